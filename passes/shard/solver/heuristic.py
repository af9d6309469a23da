"""Answers without search: the cheapest of all, the cheapest at a price on bytes, the lightest.

The Lagrangian of the memory rows T that bind (Fisher, 1981): for every price p >= 0 a byte

    L(p) = min_x [ cost(x) + p * sum_{t in T} bytes_t(x) ]  -  p * |T| * limit

is at most the cost of any assignment that fits, and its minimum is one of the problem without
memory, which elimination solves. A dear price makes the answer fit, a cheap one makes it break the
limit: between the two, the price is halved.

    seconds
       |  x  x                     what is cheap breaks the limit
       |        x  |  x            what fits costs more
       |___________|_______ p      the price looked for is where they meet

Where no price does, the cheapest of all is mended: nodes give way where rows are over the limit,
and then take back what is cheaper and still fits. The lightest is the assignment that holds least;
a bound tells below what no limit can be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.shard.solver.elimination import eliminate
from autopar.passes.shard.solver.problem import (
    Copy,
    Edge,
    Floats,
    Ints,
    Problem,
    forbidden_cost,
    starts,
)
from autopar.passes.shard.solver.shrink import shrink

_FIRST_SHARE = 0.25  # of the seconds, what the peak's bytes are worth at the first price
_DEARER = 4.0  # times the price while nothing fits
_ENTRIES = 20_000_000  # of all joint tables of an elimination: some 50 ms
_WIDEST = 1_000_000  # and of one
_MENDED_ENTRIES = (30_000, 300_000)  # of one table; which of the answers mends better varies
_GROWTHS = (0.5, 0.1)  # of a price where a row is still over the limit
_FIRST_PRICE = 1e-3  # of all seconds, what holding the limit at all times costs at first
_MENDS, _SWEEPS, _DESCENTS = 200, 2, 100  # rounds; sweeps over all nodes in a round of mending
_LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class FirstAnswer:
    """An assignment that fits, () for none, and what every one that fits costs at least.

    The price is that of a byte at all binding times together where the bound is best.
    """

    choice: tuple[int, ...]
    seconds: float
    bound_seconds: float
    seconds_per_byte: float = 0.0
    binding_times: tuple[int, ...] = ()


def first_answer(problem: Problem, prices: int = 5) -> FirstAnswer:
    """The cheapest assignment where that fits, or the best one found at some prices on bytes."""
    open_nodes = sum(len(c) > 1 for c in problem.costs)
    most = min(_WIDEST, _ENTRIES // max(open_nodes, 1))
    plain = replace(problem, usages=())
    found = eliminate(plain, most)
    bound = found.seconds if found.exact else -float("inf")
    if not np.isfinite(found.seconds) or problem.fits(found.choice):
        choice = found.choice if np.isfinite(found.seconds) else ()
        return FirstAnswer(choice, found.seconds, bound)
    best: tuple[int, ...] = ()
    seconds, low, worth = float("inf"), 0.0, 0.0
    rows = problem.worst_times(found.choice)
    weights = _bytes_at(problem, rows)
    high = _FIRST_SHARE * found.seconds / max(problem.peak_bytes(found.choice), 1.0)
    for _ in range(prices):
        price = 0.5 * (low + high) if best else high
        paid = tuple(c + price * w for c, w in zip(plain.costs, weights, strict=True))
        found = eliminate(replace(plain, costs=paid), most)
        paid_back = found.seconds - price * problem.limit_bytes * len(rows)
        if found.exact and paid_back > bound:
            bound, worth = paid_back, price * len(rows)
        cost = problem.seconds(found.choice)
        if problem.fits(found.choice) and np.isfinite(cost):
            high = price
            if cost < seconds:
                best, seconds = found.choice, cost
        else:
            low, high = price, high if best else price * _DEARER
    return FirstAnswer(best, seconds, bound, worth, tuple(rows))


def first_choice(problem: Problem) -> tuple[int, ...]:
    """The first answer's assignment: for many problems, of which none need be solved well."""
    small = shrink(problem)
    choice = first_answer(small.problem).choice if small.possible else ()
    return small.restore(choice) if choice else ()


def _bytes_at(problem: Problem, times: Sequence[int]) -> list[Floats]:
    """Bytes of each node's choices, summed over the times."""
    weights = [np.zeros(len(c)) for c in problem.costs]
    for usage in problem.usages:
        hits = sum(usage.first <= t <= usage.last for t in times)
        if hits:
            weights[usage.node] = weights[usage.node] + hits * usage.nbytes
    return weights


def mended_answers(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Assignments that fit: the cheapest without memory, made to fit and then cheaper again.

    Without machine code, and soon there: what a busy machine answers before anything is compiled.
    """
    sweeps = _Sweeps(problem)
    for most in _MENDED_ENTRIES:
        cheapest = np.array(eliminate(replace(problem, usages=()), most).choice, dtype=np.int64)
        for growth in _GROWTHS:
            mended = sweeps.mend(cheapest, growth)
            if mended is not None:
                choice = tuple(int(c) for c in sweeps.descend(mended))
                if np.isfinite(problem.seconds(choice)):
                    yield choice


class _Sweeps:
    """Coordinate descent over all nodes at once, on flat arrays.

    In a sweep every node asks what it would gain by its best choice while all others stay, and
    those move that would gain more than any neighbor. No two of them share an edge, so each gains
    what it asked for:

        gain    3 --- 5 --- 2 --- 4        5 and 4 move; 3 and 2 ask again in the next sweep

    Letters: n entries of `costs`, one for each node and choice; a arcs, edges seen from one end.
    """

    def __init__(self, problem: Problem) -> None:
        self._sizes = np.array([len(c) for c in problem.costs], dtype=np.int64)
        self._first = starts(self._sizes)[:-1]  # [node] where its choices start among n
        self._node_of = np.repeat(np.arange(len(self._sizes)), self._sizes)  # [n]
        self._costs = np.concatenate(problem.costs)
        self._read_edges(problem)
        self._read_usages(problem)
        # What is forbidden is dearer than all else together, but can be compared and left.
        parts = len(problem.costs) + len(problem.edges)
        dearest = forbidden_cost(self._costs, self._entries, parts)
        self._costs[~np.isfinite(self._costs)] = dearest
        self._entries[~np.isfinite(self._entries)] = dearest

    def _read_edges(self, problem: Problem) -> None:
        left = np.array([e.left for e in problem.edges], dtype=np.int64)
        right = np.array([e.right for e in problem.edges], dtype=np.int64)
        rows, columns = self._sizes[left], self._sizes[right]
        table = np.tile(starts(rows * columns)[:-1], 2)
        own, other = np.concatenate([left, right]), np.concatenate([right, left])
        step = np.concatenate([columns, np.ones_like(right)])  # between entries of own choices
        skip = np.concatenate([np.ones_like(left), columns])  # and of the other's
        order = np.argsort(own, kind="stable")
        own, self._other, self._skip = own[order], other[order], skip[order]
        self._entries = np.concatenate([np.zeros(0), *(e.table.ravel() for e in problem.edges)])
        sizes = self._sizes[own]
        self._arc = np.repeat(np.arange(len(own)), sizes)
        choice = np.arange(len(self._arc)) - starts(sizes)[self._arc]
        self._entry = table[order][self._arc] + step[order][self._arc] * choice
        self._arc_to = self._first[own][self._arc] + choice  # among n
        self._joined, self._joined_from = np.unique(own, return_index=True)  # nodes with arcs

    def _read_usages(self, problem: Problem) -> None:
        self._user = np.array([u.node for u in problem.usages], dtype=np.int64)
        self._from = np.array([u.first for u in problem.usages], dtype=np.int64)
        self._until = np.array([u.last + 1 for u in problem.usages], dtype=np.int64)
        self._nbytes = np.concatenate([np.zeros(0), *(u.nbytes for u in problem.usages)])
        sizes = self._sizes[self._user]
        self._bytes_at = starts(sizes)[:-1]
        self._usage = np.repeat(np.arange(len(sizes)), sizes)
        choice = np.arange(len(self._usage)) - self._bytes_at[self._usage]
        self._usage_to = self._first[self._user][self._usage] + choice  # among n
        self._horizon = problem.horizon
        self._most = problem.most_bytes

    def mend(self, choice: Ints, growth: float) -> Ints | None:
        """Make the bytes of rows over the limit dearer, round by round, until none is."""
        held = self._held(choice)
        seconds = abs(float(self._costs[self._first + choice].sum()))
        unit = _FIRST_PRICE * seconds / (max(len(held), 1) * max(self._most, 1.0))
        price = np.zeros(len(held))
        for _ in range(_MENDS):
            over = held > self._most
            if not over.any():
                return choice
            price[over] += np.maximum(growth * price[over], unit)
            before = np.concatenate([[0.0], np.cumsum(price)])
            worth = before[self._until] - before[self._from]
            paid = _summed(self._usage_to, worth[self._usage] * self._nbytes, len(self._costs))
            for _ in range(_SWEEPS):
                movers, best = self._sweep(choice, paid)
                if not len(movers):
                    break
                choice = choice.copy()
                choice[movers] = best[movers]
            held = self._held(choice)
        return None

    def descend(self, choice: Ints) -> Ints:
        """Move what gains most, as much of it at once as keeps all rows, while anything does."""
        for _ in range(_DESCENTS):
            movers, best = self._sweep(choice, 0.0)
            moved = choice
            while len(movers):
                moved = choice.copy()
                moved[movers] = best[movers]
                if (self._held(moved) <= self._most).all():
                    break
                movers = movers[: len(movers) // 2]
            if not len(movers):
                break
            choice = moved
        return choice

    def _sweep(self, choice: Ints, paid: Floats | float) -> tuple[Ints, Ints]:
        """The nodes that move, those that gain most first, and the best choice of every node."""
        entries = self._entry + (choice[self._other] * self._skip)[self._arc]
        total = self._costs + paid
        total = total + _summed(self._arc_to, self._entries[entries], len(total))
        least = np.minimum.reduceat(total, self._first)
        hits = np.flatnonzero(total == least[self._node_of])
        nodes, where = np.unique(self._node_of[hits], return_index=True)
        best = hits[where] - self._first[nodes]
        now = total[self._first + choice]
        gain = np.where(now - least > _LEAST_GAIN * np.abs(now), now - least, 0.0)
        order = np.lexsort((-np.arange(len(gain)), gain))
        rank = np.empty(len(gain), dtype=np.int64)
        rank[order] = np.arange(len(gain))
        rank[gain == 0] = -1
        rival = np.full(len(gain), -1)
        if len(self._joined):
            rival[self._joined] = np.maximum.reduceat(rank[self._other], self._joined_from)
        movers = np.flatnonzero(rank > rival)
        return movers[np.argsort(-rank[movers])], best

    def _held(self, choice: Ints) -> Floats:
        """The bytes held at each time."""
        held = self._nbytes[self._bytes_at + choice[self._user]]
        size = self._horizon + 1
        return np.cumsum(_summed(self._from, held, size) - _summed(self._until, held, size))[:-1]


def _summed(to: Ints, values: Floats, size: int) -> Floats:
    """The values added up at their places."""
    return np.bincount(to, values, minlength=size).astype(np.float64, copy=False)


# -- the lightest ----------------------------------------------------------------------------------


_ROUNDS = 20
_STALE = 4  # rounds without a lighter one
_SURE = 1 + 1e-9
_ROOM = (1.0, 1.5, 3.0)


@dataclass(frozen=True)
class Least:
    """The least peak found with its assignment, and a bound that no assignment goes below.

    Infinite, with (), where no assignment at all was found.
    """

    choice: tuple[int, ...]
    nbytes: float
    bound_bytes: float


def min_memory(problem: Problem, copies: Sequence[Copy] = ()) -> Least:
    """Lets each node take the choice that holds least, weighed by how near the peak it is held.

    Each round the times that were highest weigh more. Where nodes cannot be taken one by one, for
    a move between two choices may be impossible or hold a copy, they are weighed together.
    """
    bound = problem.needed_bytes
    weight = np.ones(max(problem.horizon, 1))
    best: tuple[int, ...] = ()
    least, stale = float("inf"), 0
    for _ in range(_ROUNDS):
        choice = _lightest(problem, weight, copies)
        if not choice:
            break
        over_time = problem.held_bytes(choice)
        for copy in copies:
            over_time[copy.first : copy.last + 1] += copy.held[
                choice[copy.left], choice[copy.right]
            ]
        peak = float(over_time.max()) if over_time.size else 0.0
        stale += 1
        if peak < least:
            best, least, stale = choice, peak, 0
        if stale == _STALE:
            break
        if least <= bound * _SURE or not over_time.size:
            break
        weight = weight * (1 + over_time / max(peak, 1.0))
        weight = weight / weight.max()
    return Least(best, least, bound)


def light_answers(problem: Problem, copies: Sequence[Copy]) -> tuple[tuple[int, ...], ...]:
    """Assignments that hold little, whatever the limit: the least, and cheap ones that hold more.

    What is neither in the rows nor among the copies may be less where moves cost less.
    """
    least = min_memory(problem)
    if not least.choice:
        return ()
    copied = min_memory(problem, copies).choice
    limits = (replace(problem, limit_bytes=least.nbytes * n * _SURE) for n in _ROOM)
    return (least.choice, copied, *(c for p in limits if (c := first_answer(p).choice)))


def _lightest(problem: Problem, weight: Floats, copies: Sequence[Copy]) -> tuple[int, ...]:
    """The possible assignment of least weighed bytes, or () if none is found."""
    held: list[Floats] = [np.zeros(len(c)) for c in problem.costs]
    summed = np.concatenate([[0.0], np.cumsum(weight)])
    for usage in problem.usages:
        held[usage.node] += (summed[usage.last + 1] - summed[usage.first]) * usage.nbytes
    held = [np.where(np.isinf(c), np.inf, h) for c, h in zip(problem.costs, held, strict=True)]
    choice = tuple(int(h.argmin()) for h in held)
    if not copies and np.isfinite(problem.seconds(choice)):
        return choice
    edges = tuple(
        Edge(e.left, e.right, np.where(np.isinf(e.table), np.inf, 0.0)) for e in problem.edges
    ) + tuple(
        Edge(c.left, c.right, (summed[c.last + 1] - summed[c.first]) * c.held) for c in copies
    )
    choice = eliminate(replace(problem, costs=tuple(held), edges=edges, usages=())).choice
    return choice if np.isfinite(problem.seconds(choice)) else ()
