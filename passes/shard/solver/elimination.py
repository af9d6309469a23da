"""Bucket elimination: the exact best assignment of a narrow graph, memory left aside.

A node is solved for every choice of its neighbors and goes; what is left of it is one table over
these neighbors (dynamic programming without a tree to be given; Bertele and Brioschi, 1972):

    a - v - b          a - b
        |       ->      \\ /        table[a,b,c] = min_v cost[v] + va[v,a] + vb[v,b] + vc[v,c]
        c                c

1. The node whose joint table is smallest goes next.
2. Where even that is too large, the node of the largest table is settled at the choice that looks
   best by itself, which is the heuristic RN of Scholz and Eckstein (2002); the answer is then good,
   and no longer proven.
3. Backward over the order, every node takes its best choice for those of its neighbors. The tables
   that it was solved with are read once more, at these alone: to know the best choices for all
   others would take several times as long as their minima.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.passes.shard.solver.problem import Floats, Problem

_MOST_ENTRIES = 30_000  # of a joint table: some tenth of a millisecond
_MOST_DIMS = 12  # numpy has 32 or 64, but tables of that many neighbors are long too large


@dataclass(frozen=True)
class Eliminated:
    """An assignment with its seconds, and whether it is proven to be the best."""

    choice: tuple[int, ...]
    seconds: float
    exact: bool


def eliminate(problem: Problem, most_entries: int = _MOST_ENTRIES) -> Eliminated:
    """The best assignment by elimination; the memory limit is not looked at."""
    buckets = _Buckets(problem, most_entries)
    choice = buckets.run()
    return Eliminated(choice, problem.seconds(choice), buckets.exact)


Scope = tuple[int, ...]


@dataclass(frozen=True)
class _Gone:
    """A node that is solved for all choices of its neighbors: its costs, and tables over them."""

    node: int
    costs: Floats
    tables: Mapping[Scope, Floats] = field(default_factory=dict[Scope, Floats])

    def best(self, choice: Sequence[int]) -> int:
        """The best choice where the neighbors have theirs."""
        total = self.costs
        for scope, table in self.tables.items():
            at = tuple([slice(None) if w == self.node else choice[w] for w in scope])
            total = total + table[at]
        return int(total.argmin())


class _Buckets:
    """The tables by the nodes that they are over, while nodes go one by one."""

    def __init__(self, problem: Problem, most_entries: int) -> None:
        self.exact = True
        self._most = most_entries
        self._sizes = [len(c) for c in problem.costs]
        self._costs: list[Floats] = list(problem.costs)
        self._tables: list[dict[Scope, Floats]] = [{} for _ in problem.costs]  # by node
        self._near: list[set[int]] = [set() for _ in problem.costs]
        self._back: list[_Gone] = []
        for edge in problem.edges:
            u, v, table = edge.left, edge.right, edge.table
            if self._sizes[u] == 1:  # nothing to choose at one end: the other pays
                self._costs[v] = self._costs[v] + table[0]
            elif self._sizes[v] == 1:
                self._costs[u] = self._costs[u] + table[:, 0]
            else:
                self._add((u, v) if u < v else (v, u), table if u < v else table.T)

    def run(self) -> tuple[int, ...]:
        """Let every node go, and read the assignment off backward."""
        sizes = [self._joint_size(v) for v in range(len(self._sizes))]
        alive = [bool(near) for near in self._near]
        # What stands alone is solved by itself.
        alone = [v for v, near in enumerate(self._near) if not near]
        self._back += [_Gone(v, self._costs[v]) for v in alone]
        queue = [(size, v) for v, size in enumerate(sizes) if alive[v]]
        heapq.heapify(queue)
        while queue:
            size, v = heapq.heappop(queue)
            if not alive[v] or size != sizes[v]:
                continue  # an entry from before its neighbors changed
            if size > self._most or len(self._near[v]) >= _MOST_DIMS:
                heapq.heappush(queue, (size, v))  # it is still to go, if not now
                v = max((w for w, there in enumerate(alive) if there), key=sizes.__getitem__)
                near = self._settle(v)
            else:
                near = self._solve(v)
            alive[v] = False
            for w in near:
                sizes[w] = self._joint_size(w)
                heapq.heappush(queue, (sizes[w], w))
        choice = [0] * len(self._sizes)
        for gone in reversed(self._back):
            choice[gone.node] = gone.best(choice)
        return tuple(choice)

    def _joint_size(self, v: int) -> int:
        size = self._sizes[v]
        for w in self._near[v]:
            size *= self._sizes[w]
        return size

    def _add(self, scope: Scope, table: Floats) -> None:
        held = self._tables[scope[0]].get(scope)
        if held is not None:
            table = held + table
        for v in scope:
            self._tables[v][scope] = table
            self._near[v].update(w for w in scope if w != v)

    def _drop(self, v: int) -> dict[Scope, Floats]:
        """Take a node out of the graph; its tables."""
        tables, self._tables[v] = self._tables[v], {}
        for scope in tables:
            for w in scope:
                if w != v:
                    del self._tables[w][scope]
        for w in self._near[v]:
            self._near[w].discard(v)
        return tables

    def _solve(self, v: int) -> Scope:
        """Eliminate a node exactly; its neighbors, over which the new table is."""
        near = tuple(sorted(self._near[v]))
        gone = _Gone(v, self._costs[v], self._drop(v))
        self._back.append(gone)
        if len(near) == 1:  # most of them, and there is one table to add
            (w,), (table,) = near, gone.tables.values()
            total = gone.costs[:, None] + (table if v < w else table.T)
            self._costs[w] = self._costs[w] + total.min(axis=0)
            return near
        total = gone.costs.reshape(-1, *(1,) * len(near))
        for scope, table in gone.tables.items():
            # v's dim first, those of the scope's other nodes in their order, others of length 1
            at = scope.index(v)
            shape = [self._sizes[v]] + [self._sizes[w] if w in scope else 1 for w in near]
            rest = (i for i in range(len(scope)) if i != at)
            total = total + table.transpose(at, *rest).reshape(shape)
        if near:
            self._add(near, total.min(axis=0))
        return near

    def _settle(self, v: int) -> Scope:
        """Give a node the choice that is best if all its tables' other nodes follow it."""
        near = tuple(sorted(self._near[v]))
        tables = self._drop(v)
        total = self._costs[v]
        for scope, table in tables.items():
            for i, w in enumerate(scope):
                if w != v:  # it pays its own costs once, in parts of all of its tables
                    part = self._costs[w] / (len(self._tables[w]) + 1)
                    table = table + part.reshape([-1 if j == i else 1 for j in range(len(scope))])
            total = total + table.min(axis=tuple(i for i, w in enumerate(scope) if w != v))
        best = int(total.argmin())
        self._back.append(_Gone(v, total))
        for scope, table in tables.items():
            rest = tuple(w for w in scope if w != v)
            left: Floats = np.take(table, [best], axis=scope.index(v)).squeeze(scope.index(v))
            if len(rest) == 1:
                self._costs[rest[0]] = self._costs[rest[0]] + left
            else:
                self._add(rest, left)
        for i in near:  # a scope that is gone may have been all that joined two of them
            self._near[i] = {w for scope in self._tables[i] for w in scope if w != i}
        self.exact = False
        return near
