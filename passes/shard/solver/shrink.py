"""Contracts a problem exactly: nodes that another node determines join it, choices that lose go.

1. An edge whose table allows, for each choice of one end, at most one choice of the other makes the
   other follow. What a node holds then moves with its owner, so a node may hold many usages.
2. A choice goes that breaks the limit even if every other node holds its least:

       bytes |      limit ____________
             |        __ <- a choice that goes
             |   ____|__|___ what all others hold at least
             |___________________ time

   What is left holds more at least, so there may be others.
3. A choice goes that another matches or beats in everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.passes.shard.solver.problem import Edge, Floats, Ints, Problem, Usage

_MOST_GROWTH = 4.0  # a table may grow so much when its node joins one with more choices
_AT_ONCE = 1_000_000  # comparisons of all choices by all traits that are made in one go
_TRAITS_AT_ONCE = 16  # about so many are compared of all pairs, then of those that are left
_ROUNDING = 1 + 2e-9  # of the limit, a little more than what still counts as within it
_WIDEST = 2_000  # nodes of more choices are not searched for dominated ones


@dataclass(frozen=True)
class Shrunk:
    """The smaller problem; old node v takes choice `picks[v][c]` where its owner takes c.

    New node n is old node `living[n]`; old choice c of that is now choice `places[n][c]`, that of
    the choice that beats it where it was dominated, and -1 where it was forbidden.
    """

    problem: Problem
    owners: tuple[int, ...]
    picks: tuple[Ints, ...]
    living: tuple[int, ...]
    places: tuple[Ints, ...]
    possible: bool  # False where every choice of some node is forbidden

    def shrink(self, choice: Sequence[int]) -> Ints | None:
        """The owners' part of an assignment, which costs and holds no more than the whole.

        None where a choice of the assignment is forbidden.
        """
        pairs = zip(self.places, self.living, strict=True)
        found = np.array([place[choice[node]] for place, node in pairs], dtype=np.int64)
        return None if (found < 0).any() else found

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same assignment of the old nodes."""
        pairs = zip(self.owners, self.picks, strict=True)
        return tuple(int(pick[choice[owner]]) for owner, pick in pairs)


def shrink(problem: Problem) -> Shrunk:
    """Let nodes join until none must follow another, and drop dominated choices."""
    work = _Work(problem)
    work.run()
    return work.shrunk()


class _Work:
    """The problem while it shrinks: near[u][v] is the table with u's choices as rows."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs: list[Floats] = list(problem.costs)
        self._near: list[dict[int, Floats]] = [{} for _ in problem.costs]
        self._held: list[list[_Held]] = [[] for _ in problem.costs]
        self._places = [np.arange(len(c)) for c in problem.costs]
        self._alive = [True] * len(problem.costs)
        self._possible = True
        self._log: list[tuple[int, int, Ints]] = []  # (node, owner, the node's choice by owner's)
        # [one end, other] the last table of the pair that was found to say nothing by itself: it
        # allows all, and is no sum of two costs. It is looked at again once it is another one.
        self._looked_at: dict[tuple[int, int], Floats] = {}
        for usage in problem.usages:
            self._held[usage.node].append(_Held(usage.first, usage.last, usage.nbytes))
        for edge in problem.edges:
            self._link(edge.left, edge.right, edge.table)

    def _link(self, left: int, right: int, table: Floats) -> None:
        held = self._near[left].get(right)
        joined = table if held is None else held + table
        self._near[left][right] = joined
        self._near[right][left] = joined.T

    def run(self) -> None:
        """Joins and cheap drops until nothing changes, dominated choices once, then again."""
        self._settle(range(len(self._costs)))
        while self._possible and (heavy := self._forbid_heavy()):
            self._settle(heavy)
        changed: set[int] = set()
        for v in self._living():
            if len(self._costs[v]) == 1:
                continue
            keep, place = self._undominated(v)
            if keep.size < self._costs[v].size:
                self._narrow(v, keep, place)
                changed |= self._near[v].keys() | ({v} if self._near[v] else set())
        self._settle(sorted(changed))

    def _living(self) -> list[int]:
        return [v for v, alive in enumerate(self._alive) if alive]

    def _settle(self, nodes: Iterable[int]) -> None:
        waiting = deque(nodes)
        queued = set(waiting)
        while waiting:
            v = waiting.popleft()
            queued.discard(v)
            if not self._alive[v]:
                continue
            for w in self._tidied(v):
                if w not in queued:
                    queued.add(w)
                    waiting.append(w)

    def _tidied(self, v: int) -> set[int]:
        """Drop what is forbidden, then look at each edge once; returns the nodes that changed."""
        allowed = np.isfinite(self._costs[v])
        finite: dict[int, npt.NDArray[np.bool_] | None] = {}  # None where all of them are
        for w, table in self._near[v].items():
            if self._looked_at.get((v, w)) is table:
                continue
            possible = np.isfinite(table)
            finite[w] = None if possible.all() else possible
            if finite[w] is not None:
                allowed &= possible.any(axis=1)
        if not allowed.any():
            self._possible = False
            return set()
        if not allowed.all():
            self._narrow(v, np.flatnonzero(allowed), np.where(allowed, allowed.cumsum() - 1, -1))
            return {v, *self._near[v]}
        for w, entries in finite.items():
            if entries is None:
                self._fold(v, w)
                continue
            ties = (
                bool((entries.sum(axis=0) <= 1).all()),
                bool((entries.sum(axis=1) <= 1).all()),
            )
            follows = ties[0] and (not ties[1] or len(self._near[v]) <= len(self._near[w]))
            if follows and self._may_join(v, w):
                return self._join(v, w, entries)
            if ties[1] and self._may_join(w, v):
                return self._join(w, v, entries.T)
        return set()

    def _fold(self, v: int, w: int) -> None:
        """Move a table into its two ends' costs if it is a sum of them, as one row always is."""
        table = self._near[v][w]
        first = table[0] - table[0, 0]
        if (
            min(table.shape) > 1
            and (
                table[-1, -1] - table[-1, 0] != first[-1]  # most tables are told by one number
                or (table - table[:, :1] - first).any()
            )
        ):
            self._looked_at[v, w], self._looked_at[w, v] = table, self._near[w][v]
            return
        self._costs[v] = self._costs[v] + table[:, 0]
        self._costs[w] = self._costs[w] + first
        del self._near[v][w], self._near[w][v]

    def _may_join(self, v: int, owner: int) -> bool:
        growth = len(self._costs[owner]) / len(self._costs[v])
        return growth <= _MOST_GROWTH or len(self._near[v]) == 1

    def _join(self, v: int, owner: int, finite: npt.NDArray[np.bool_]) -> set[int]:
        """The node follows its owner: `finite` [its choices, owner's] has one True a column."""
        table = self._near[owner].pop(v)
        del self._near[v][owner]
        pick = finite.argmax(axis=0)
        self._costs[owner] = (
            self._costs[owner] + self._costs[v][pick] + table[np.arange(len(pick)), pick]
        )
        touched = {owner}
        for other, far in self._near[v].items():
            del self._near[other][v]
            self._link(owner, other, far[pick])
            touched.add(other)
        self._held[owner] += [_Held(h.first, h.last, h.nbytes[pick]) for h in self._held[v]]
        self._near[v], self._held[v], self._alive[v] = {}, [], False
        self._log.append((v, owner, pick))
        return touched

    def _narrow(self, v: int, keep: Ints, place: Ints) -> None:
        """Leave a node some choices; each of the old ones has its place among them, or -1."""
        before = self._places[v]
        self._places[v] = np.where(before >= 0, place[before], -1)
        self._costs[v] = self._costs[v][keep]
        self._held[v] = [_Held(h.first, h.last, h.nbytes[keep]) for h in self._held[v]]
        for w, table in self._near[v].items():
            self._near[v][w] = table[keep]
            self._near[w][v] = self._near[v][w].T
        self._log.append((v, v, keep))

    def _forbid_heavy(self) -> list[int]:
        """Forbid choices that hold more than all others leave room for; the nodes that had some."""
        if not np.isfinite(self._problem.limit_bytes):
            return []
        profiles = [(v, *_profile(self._held[v])) for v in self._living() if self._held[v]]
        change = np.zeros(self._problem.horizon + 1)
        for _, cuts, nbytes in profiles:
            change[cuts] += np.diff(nbytes.min(axis=1), prepend=0.0)
        slack = self._problem.limit_bytes * _ROUNDING - np.cumsum(change)[:-1]
        least = slack.min(initial=np.inf)
        found: list[int] = []
        for v, cuts, nbytes in profiles:
            extra = (nbytes - nbytes.min(axis=1, keepdims=True))[:-1]
            if extra.max(initial=0.0) > least:
                room = np.minimum.reduceat(slack[: cuts[-1]], cuts[:-1])
                heavy = (extra > room[:, None]).any(axis=0)
                if heavy.any():
                    self._costs[v] = np.where(heavy, np.inf, self._costs[v])
                    found.append(v)
        return found

    def _undominated(self, v: int) -> tuple[Ints, Ints]:
        """Choices that no other matches or beats in everything; for each choice one that does."""
        count = len(self._costs[v])
        if count > _WIDEST:
            return np.arange(count), np.arange(count)
        if not (self._near[v] or self._held[v]):  # only its own cost counts
            return np.array([self._costs[v].argmin()]), np.zeros(count, dtype=np.int64)
        held = [h.nbytes[:, None] for h in self._held[v]]
        traits = np.hstack([self._costs[v][:, None], *held, *self._near[v].values()])
        beats = _beats(traits)
        if np.count_nonzero(beats) == count:  # each beats itself alone
            return np.arange(count), np.arange(count)
        if count * traits.size <= _AT_ONCE:
            earlier = np.less.outer(np.arange(count), np.arange(count))
            keep = np.flatnonzero(~(beats & (~beats.T | earlier)).any(axis=0))
            place = beats[keep].argmax(axis=0)
            place[keep] = np.arange(len(keep))
            return keep, place
        order = np.argsort(traits.sum(axis=1), kind="stable")
        best = np.full(count, -1, dtype=np.int64)  # the first one kept that beats it
        for c in order.tolist():
            if best[c] < 0:
                best[beats[c] & (best < 0)] = c
        keep = np.flatnonzero(best == np.arange(count))
        return keep, np.searchsorted(keep, best)

    def shrunk(self) -> Shrunk:
        living = self._living()
        where = {old: new for new, old in enumerate(living)}
        edges = tuple(
            Edge(where[u], where[v], np.ascontiguousarray(table))
            for u in living
            for v, table in self._near[u].items()
            if u < v
        )
        usages = tuple(Usage(where[v], *h.entry()) for v in living for h in self._held[v])
        costs = tuple(self._costs[v] for v in living)
        small = replace(self._problem, costs=costs, edges=edges, usages=usages)
        owners = list(range(len(self._costs)))
        picks = [np.arange(len(c)) for c in self._costs]
        for node, owner, pick in reversed(self._log):
            owners[node] = owners[owner]
            picks[node] = pick[picks[owner]]
        return Shrunk(
            small,
            tuple(where[o] for o in owners),
            tuple(picks),
            tuple(living),
            tuple(self._places[v] for v in living),
            self._possible,
        )


@dataclass(frozen=True)
class _Held:
    """Bytes by choice from a first to a last time."""

    first: int
    last: int
    nbytes: Floats

    def entry(self) -> tuple[int, int, Floats]:
        """The fields of a `Usage` but for its node."""
        return self.first, self.last, self.nbytes


def _beats(traits: Floats) -> npt.NDArray[np.bool_]:
    """[choice, other] whether a choice matches or beats the other in every trait.

    Of many, most pairs part at some traits, taken from all over: only the others are looked at for
    those that are left.
    """
    if len(traits) * traits.size <= _AT_ONCE:
        found: npt.NDArray[np.bool_] = np.all(traits[:, None, :] <= traits[None, :, :], axis=2)
        return found
    apart = max(1, traits.shape[1] // _TRAITS_AT_ONCE)
    found = np.ones((len(traits), len(traits)), dtype=np.bool_)
    for column in traits[:, ::apart].T:
        found &= column[:, None] <= column
    ones, others = np.nonzero(found)
    for start in range(1, apart):
        some = traits[:, start::apart]
        left = (some[ones] <= some[others]).all(axis=1)
        ones, others = ones[left], others[left]
    found = np.zeros_like(found)
    found[ones, others] = True
    return found


def _profile(held: Sequence[_Held]) -> tuple[Ints, Floats]:
    """The times from which a node holds other bytes, and its bytes by choice from each on."""
    cuts = np.unique([t for h in held for t in (h.first, h.last + 1)])
    change = np.zeros((len(cuts), len(held[0].nbytes)))
    for h in held:
        change[np.searchsorted(cuts, h.first)] += h.nbytes
        change[np.searchsorted(cuts, h.last + 1)] -= h.nbytes
    return cuts, change.cumsum(axis=0)
