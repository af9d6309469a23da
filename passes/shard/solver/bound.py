"""A lower bound that proves most choices needless: block coordinate ascent on the dual.

Costs are moved between nodes and edges without changing any assignment's total, so that

    bound = sum_v min_c node[v,c]  +  sum_uv min_cd (table - left - right)[c,d]

grows edge by edge (the handshake step of MPLP++; Tourani, Shekhovtsov, Rother and Savchynskyy,
2018). A choice whose best total under the bound is above a known assignment's is fixed out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.passes.shard.solver.polish import improve
from autopar.passes.shard.solver.problem import Floats, Problem


@dataclass(frozen=True)
class Bounded:
    """The bound, an assignment with its seconds, and for each node the choices still possible."""

    bound_seconds: float
    choice: tuple[int, ...]
    seconds: float
    left: tuple[npt.NDArray[np.int64], ...]

    @property
    def gap(self) -> float:
        """The share of the assignment's seconds that is not proven."""
        return max(0.0, self.seconds - self.bound_seconds) / max(self.seconds, 1e-30)


def bound_problem(problem: Problem, sweeps: int, limit: float | None = None) -> Bounded:
    """Ascend the dual for some sweeps over the edges, then round, improve and fix choices out.

    Memory is ignored. Choices are kept that may be part of an assignment of at most `limit`
    seconds, or of the one found.
    """
    dual = _Dual(problem)
    last = dual.bound()
    for _ in range(sweeps):
        dual.sweep()
        now = dual.bound()
        if now - last <= 1e-7 * abs(now):
            break
        last = now
    rounded = improve(problem, dual.rounded())
    seconds = problem.seconds(rounded)
    left = dual.left_below(seconds if limit is None else limit)
    return Bounded(min(dual.bound(), seconds), rounded, seconds, left)


class _Dual:
    """Node costs and what each edge has given to its two nodes."""

    def __init__(self, problem: Problem) -> None:
        self._edges = problem.edges
        self._nodes: list[Floats] = [c.copy() for c in problem.costs]
        self._given: list[list[Floats]] = [
            [np.zeros(e.table.shape[0]), np.zeros(e.table.shape[1])] for e in problem.edges
        ]
        self._near: list[list[int]] = [[] for _ in problem.costs]
        for i, e in enumerate(problem.edges):
            self._near[e.left].append(i)
            self._near[e.right].append(i)

    def _rest(self, i: int) -> Floats:
        left, right = self._given[i]
        rest: Floats = self._edges[i].table - left[:, None] - right[None, :]
        return rest

    def bound(self) -> float:
        nodes = sum(float(n.min()) for n in self._nodes)
        return nodes + sum(float(self._rest(i).min()) for i in range(len(self._edges)))

    def sweep(self) -> None:
        """Shakes hands on all edges, there and back, so that costs travel both ways."""
        for i in range(len(self._edges)):
            self._handshake(i)
        for i in reversed(range(len(self._edges))):
            self._handshake(i)

    def _handshake(self, i: int) -> None:
        edge = self._edges[i]
        u, v = edge.left, edge.right
        whole = self._rest(i) + self._nodes[u][:, None] + self._nodes[v][None, :]
        to_left = 0.5 * whole.min(axis=1)
        to_right = (whole - to_left[:, None]).min(axis=0)
        to_left = (whole - to_right[None, :]).min(axis=1)
        self._given[i][0] += to_left - self._nodes[u]
        self._given[i][1] += to_right - self._nodes[v]
        self._nodes[u], self._nodes[v] = to_left, to_right

    def rounded(self) -> tuple[int, ...]:
        """Nodes in order, each at its best given those before it."""
        choice = [-1] * len(self._nodes)
        for v, cost in enumerate(self._nodes):
            total = cost.copy()
            for i in self._near[v]:
                edge, rest = self._edges[i], self._rest(i)
                other = edge.right if edge.left == v else edge.left
                table = rest if edge.left == v else rest.T
                total += table[:, choice[other]] if choice[other] >= 0 else table.min(axis=1)
            choice[v] = int(total.argmin())
        return tuple(choice)

    def left_below(self, seconds: float) -> tuple[npt.NDArray[np.int64], ...]:
        """Choices that may still be part of an assignment of no more than `seconds`."""
        bound = self.bound()
        limit = seconds + 1e-9 * abs(seconds)
        left: list[npt.NDArray[np.int64]] = []
        for v, cost in enumerate(self._nodes):
            margin = cost - cost.min()
            for i in self._near[v]:
                rest = self._rest(i)
                best = rest.min(axis=1) if self._edges[i].left == v else rest.min(axis=0)
                margin = margin + (best - best.min())
            left.append(np.flatnonzero(bound + margin <= limit))
        return tuple(left)
