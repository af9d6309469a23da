"""Shrinks a problem exactly: nodes with at most two neighbors are solved for every choice of them.

Each elimination can be undone: the chain restores in reverse. After R0, R1 and R2 of the
partitioned Boolean quadratic problem (Scholz and Eckstein, 2002), without the heuristic RN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.passes.shard.solver.problem import Edge, Floats, Problem


@dataclass(frozen=True)
class Eliminated:
    """A node that was solved away: for each choice of its neighbors its best own choice."""

    node: int
    neighbors: tuple[int, ...]
    best: npt.NDArray[np.int64]  # indexed by the neighbors' choices


@dataclass(frozen=True)
class Reduced:
    """A reduced problem, the old node of each new one, and the way back."""

    problem: Problem
    kept: tuple[int, ...]
    offset_seconds: float
    eliminated: tuple[Eliminated, ...]
    node_count: int

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A full assignment from one of the reduced problem."""
        full = [-1] * self.node_count
        for node, picked in zip(self.kept, choice, strict=True):
            full[node] = picked
        for step in reversed(self.eliminated):
            full[step.node] = int(step.best[tuple(full[n] for n in step.neighbors)])
        return tuple(full)


def reduce_problem(problem: Problem, keep: frozenset[int] = frozenset()) -> Reduced:
    """Eliminate nodes of degree 0, 1 and 2 until none is left; nodes in `keep` stay."""
    work = _Work(problem)
    queue = sorted(set(range(len(problem.costs))) - keep)
    while queue:
        waiting: set[int] = set()
        for node in queue:
            if node in work.alive and len(work.near[node]) <= 2:
                waiting.update(work.eliminate(node))
        queue = sorted((waiting & work.alive) - keep)
    return work.reduced()


class _Work:
    """The problem while it shrinks: near[u][v] is the table with u's choices as rows."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.costs: list[Floats] = list(problem.costs)
        self.near: list[dict[int, Floats]] = [{} for _ in problem.costs]
        self.alive = set(range(len(problem.costs)))
        self._done: list[Eliminated] = []
        self._offset = 0.0
        for edge in problem.edges:
            self._join(edge.left, edge.right, edge.table)

    def _join(self, left: int, right: int, table: Floats) -> None:
        held = self.near[left].get(right)
        joined = table if held is None else held + table
        self.near[left][right] = joined
        self.near[right][left] = joined.T

    def eliminate(self, node: int) -> tuple[int, ...]:
        """Solve a node for every choice of its neighbors; returns these."""
        neighbors = tuple(sorted(self.near[node]))
        tables = [self.near[node][n] for n in neighbors]
        if not neighbors:
            best = np.asarray(np.argmin(self.costs[node]))
            self._offset += float(self.costs[node].min())
        elif len(neighbors) == 1:
            total = self.costs[node][:, None] + tables[0]
            best = np.argmin(total, axis=0)
            self.costs[neighbors[0]] = self.costs[neighbors[0]] + total.min(axis=0)
        else:
            total = (self.costs[node][:, None] + tables[0])[:, :, None] + tables[1][:, None, :]
            best = np.argmin(total, axis=0)
            self._join(neighbors[0], neighbors[1], total.min(axis=0))
        for n in neighbors:
            del self.near[n][node]
        self.near[node] = {}
        self.alive.discard(node)
        self._done.append(Eliminated(node, neighbors, best))
        return neighbors

    def reduced(self) -> Reduced:
        kept = tuple(sorted(self.alive))
        number = {node: i for i, node in enumerate(kept)}
        edges = tuple(
            Edge(number[u], number[v], table)
            for u in kept
            for v, table in sorted(self.near[u].items())
            if u < v
        )
        usages = tuple(
            type(u)(number[u.node], u.first, u.last, u.nbytes)
            for u in self._problem.usages
            if u.node in number
        )
        costs = tuple(self.costs[n] for n in kept)
        limit = self._problem.limit_bytes
        return Reduced(
            Problem(costs, edges, usages, limit), kept, self._offset, tuple(self._done),
            len(self._problem.costs),
        )  # fmt: skip
