"""The sharding problem: pick one choice a node, pay nodes and edges, keep within memory.

Legend: x[v,c] is 1 where node v takes choice c; e[u,v,c,d] is 1 where u takes c and v takes d.

    minimize    sum x[v,c] cost[v,c]  +  sum e[u,v,c,d] table[u,v,c,d]
    subject to  sum_c x[v,c] = 1                          for every node
                sum_d e[u,v,c,d] = x[u,c], likewise for v  for every edge
                sum of x[v,c] usage[v,c] live at t <= limit  for every time t

It is the form of the IOPDDL contest problems (google/iopddl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Edge:
    """Seconds for every pair of choices of two nodes."""

    left: int
    right: int
    table: Floats  # [choices of left, choices of right]


@dataclass(frozen=True)
class Usage:
    """Bytes that a node's choice holds from time `first` to time `last`, both included."""

    node: int
    first: int
    last: int
    nbytes: Floats  # [choices]


@dataclass(frozen=True)
class Copy:
    """Bytes that a move between two nodes' choices holds from time `first` to `last`, included.

    No memory row counts them, as it takes both nodes to know. What holds little is looked for with
    them.
    """

    left: int
    right: int
    first: int
    last: int
    seconds: Floats  # [choices of left, choices of right] of the move: 0 where nothing moves
    nbytes: Floats  # that a move holds, as `seconds` or of one choice at one of the ends

    @property
    def held(self) -> Floats:
        """[choices of left, choices of right] bytes."""
        return np.where(np.isfinite(self.seconds) & (self.seconds > 0), self.nbytes, 0.0)


@dataclass(frozen=True)
class Problem:
    """Nodes with choice costs in seconds, edges, memory use over time, and the limit in bytes."""

    costs: tuple[Floats, ...]  # per node [choices]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    limit_bytes: float = float("inf")

    @cached_property
    def horizon(self) -> int:
        """The last time at which anything is held, plus one."""
        return max((u.last for u in self.usages), default=-1) + 1

    def seconds(self, choice: Sequence[int]) -> float:
        """The objective of a full assignment."""
        nodes = sum(float(c[i]) for c, i in zip(self.costs, choice, strict=True))
        return nodes + sum(float(e.table[choice[e.left], choice[e.right]]) for e in self.edges)

    def held_bytes(self, choice: Sequence[int]) -> Floats:
        """Bytes held at each time under an assignment."""
        change = np.zeros(self.horizon + 1)
        for u in self.usages:
            held = u.nbytes[choice[u.node]]
            change[u.first] += held
            change[u.last + 1] -= held
        return np.cumsum(change)[:-1]

    def peak_bytes(self, choice: Sequence[int]) -> float:
        """The most that is ever held."""
        held = self.held_bytes(choice)
        return float(held.max()) if held.size else 0.0

    def fits(self, choice: Sequence[int]) -> bool:
        """True if the limit is kept, up to rounding."""
        return self.peak_bytes(choice) <= self.limit_bytes * (1 + 1e-9)


@dataclass(frozen=True)
class Narrowed:
    """The problem over the choices that are left, and for each node which old ones they are."""

    problem: Problem
    left: tuple[Ints, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same assignment in the old numbering."""
        return tuple(int(keep[c]) for keep, c in zip(self.left, choice, strict=True))


def narrow(problem: Problem, left: Sequence[Ints]) -> Narrowed:
    """Keep only the choices listed for each node."""
    costs = tuple(c[k] for c, k in zip(problem.costs, left, strict=True))
    edges = tuple(
        Edge(e.left, e.right, e.table[np.ix_(left[e.left], left[e.right])]) for e in problem.edges
    )
    usages = tuple(Usage(u.node, u.first, u.last, u.nbytes[left[u.node]]) for u in problem.usages)
    return Narrowed(replace(problem, costs=costs, edges=edges, usages=usages), tuple(left))


def needed_bytes(problem: Problem) -> float:
    """A bound on the peak of any assignment: at each time every node at its smallest."""
    change = np.zeros(problem.horizon + 1)
    for usage in problem.usages:
        held = float(usage.nbytes.min())
        change[usage.first] += held
        change[usage.last + 1] -= held
    return float(np.cumsum(change).max())
