"""Lets look-alike nodes share one decision: color refinement over a few hops.

Nodes of one color have equal costs, equal tables to neighbors of equal colors, and so on for
`hops` steps out (Weisfeiler and Leman). Layers of a deep model fall together, so that planning
time hardly grows with depth. Sharing is a restriction: its optimum is never below the whole
problem's, and the assignment is feasible for the whole problem.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.shard.problem import Edge, Floats, Problem, Usage


@dataclass(frozen=True)
class Shared:
    """The problem over colors, and each node's color."""

    problem: Problem
    colors: tuple[int, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A full assignment: every node takes its color's choice."""
        return tuple(choice[c] for c in self.colors)


def share_decisions(problem: Problem, hops: int) -> Shared:
    """The problem in which nodes that look alike within `hops` take the same choice."""
    colors = _refined(problem, hops)
    count = max(colors, default=-1) + 1
    costs: list[Floats | None] = [None] * count
    for color, cost in zip(colors, problem.costs, strict=True):
        held = costs[color]
        costs[color] = cost if held is None else held + cost
    tables: dict[tuple[int, int], Floats] = {}
    for edge in problem.edges:
        left, right, table = colors[edge.left], colors[edge.right], edge.table
        if left == right:
            held = costs[left]
            assert held is not None
            costs[left] = held + np.diagonal(table)
            continue
        key, oriented = ((left, right), table) if left < right else ((right, left), table.T)
        tables[key] = oriented if key not in tables else tables[key] + oriented
    edges = tuple(Edge(u, v, t) for (u, v), t in sorted(tables.items(), key=lambda kv: kv[0]))
    usages = tuple(Usage(colors[u.node], u.first, u.last, u.nbytes) for u in problem.usages)
    whole = tuple(c for c in costs if c is not None)
    return Shared(Problem(whole, edges, usages, problem.limit_bytes), tuple(colors))


def _refined(problem: Problem, hops: int) -> list[int]:
    contents: dict[tuple[tuple[int, ...], bytes], int] = {}

    def content(array: Floats) -> int:
        return contents.setdefault((array.shape, array.tobytes()), len(contents))

    colors = _numbered([content(c) for c in problem.costs])
    near: list[list[tuple[int, int]]] = [[] for _ in problem.costs]
    for edge in problem.edges:
        near[edge.left].append((content(edge.table), edge.right))
        near[edge.right].append((content(np.ascontiguousarray(edge.table.T)), edge.left))
    for _ in range(hops):
        marks: list[Hashable] = [
            (colors[v], tuple(sorted((table, colors[n]) for table, n in near[v])))
            for v in range(len(colors))
        ]
        refined = _numbered(marks)
        if max(refined, default=0) == max(colors, default=0):
            break
        colors = refined
    return colors


def _numbered(marks: Sequence[Hashable]) -> list[int]:
    """Equal marks get equal numbers, in order of first appearance."""
    numbers: dict[Hashable, int] = defaultdict(lambda: len(numbers))
    return [numbers[m] for m in marks]
