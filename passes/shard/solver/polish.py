"""Local search: better assignments by moving a node, the ends of an edge, a neighborhood."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.passes.shard.solver.problem import Floats, Problem

_REACH = 12  # nodes that a kick lets move with the one it forces


def improve(problem: Problem, start: Sequence[int]) -> tuple[int, ...]:
    """Move one node, or the two ends of an edge, while that is cheaper."""
    return _Search(problem).descend(list(start))


def kicked(problem: Problem, start: Sequence[int], kicks: int) -> tuple[int, ...]:
    """Force a node to another choice, let its neighborhood follow, descend; keep what is cheaper.

    The kicks are drawn from a fixed seed: the same problem gives the same answer.
    """
    search = _Search(problem)
    best, seconds = tuple(start), problem.seconds(start)
    draws = np.random.default_rng(0)
    for _ in range(kicks):
        node = int(draws.integers(len(best)))
        choice = int(draws.integers(len(problem.costs[node])))
        found = search.descend(search.forced(best, node, choice))
        now = problem.seconds(found)
        if now < seconds * (1 - 1e-12):
            best, seconds = found, now
    return best


class _Search:
    """A problem with each node's neighbors and tables at hand."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._edges: dict[tuple[int, int], Floats] = {}
        # Two edges of one pair count together, or their moves would undo each other for ever.
        for edge in problem.edges:
            ends, table = (edge.left, edge.right), edge.table
            if ends[1] < ends[0]:
                ends, table = (edge.right, edge.left), table.T
            held = self._edges.get(ends)
            self._edges[ends] = table if held is None else held + table
        self._near: list[list[tuple[int, Floats]]] = [[] for _ in problem.costs]
        for (left, right), table in self._edges.items():
            self._near[left].append((right, table))
            self._near[right].append((left, table.T))

    def _totals(self, choice: Sequence[int], v: int, without: int = -1) -> Floats:
        total = self._problem.costs[v]
        for other, table in self._near[v]:
            if other != without:
                total = total + table[:, choice[other]]
        return total

    def descend(self, choice: list[int]) -> tuple[int, ...]:
        """To where no move of a node or an edge is cheaper."""
        moving = True
        while moving:
            moved = [self._move_edge(choice, *ends, t) for ends, t in self._edges.items()]
            moving = any(moved)
        for v in range(len(choice)):
            total = self._totals(choice, v)
            if total.min() < total[choice[v]]:
                choice[v] = int(total.argmin())
        return tuple(choice)

    def _move_edge(self, choice: list[int], u: int, v: int, table: Floats) -> bool:
        left, right = self._totals(choice, u, v), self._totals(choice, v, u)
        both = left[:, None] + right[None, :] + table
        now, at = both[choice[u], choice[v]], int(both.argmin())
        # From what is impossible any possible pair is better; infinity less itself is no number.
        least = now - 1e-12 * abs(now) if np.isfinite(now) else now
        if not both.flat[at] < least:
            return False
        choice[u], choice[v] = divmod(at, both.shape[1])
        return True

    def forced(self, start: Sequence[int], node: int, choice: int) -> list[int]:
        """An assignment with one node forced and those around it at their best in turn."""
        changed = list(start)
        changed[node] = choice
        around = [node]
        for v in around:
            if len(around) > _REACH:
                break
            around.extend(o for o, _ in self._near[v] if o not in around)
        for v in around[1:]:
            changed[v] = int(self._totals(changed, v).argmin())
        return changed
