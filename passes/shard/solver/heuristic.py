"""A first answer without search: the cheapest of all, or the cheapest at a price on bytes.

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
one by one, and then take back what is cheaper and still fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.shard.solver.elimination import eliminate
from autopar.passes.shard.solver.problem import Floats, Problem, Usage
from autopar.passes.shard.solver.shrink import shrink

_FIRST_SHARE = 0.25  # of the seconds, what the peak's bytes are worth at the first price
_DEARER = 4.0  # times the price while nothing fits
_ENTRIES = 20_000_000  # of all joint tables of an elimination: some 50 ms
_WIDEST = 1_000_000  # and of one
_MENDED_ENTRIES = (30_000, 300_000)  # of one table; which of the answers mends better varies
_MENDS, _DESCENTS = 60, 8  # rounds over all nodes
_GROWTH = 0.5
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
    rows = _worst_rows(problem.held_bytes(found.choice), problem.limit_bytes)
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


def _worst_rows(held: Floats, limit_bytes: float) -> list[int]:
    """The times that are most over the limit, one of each quarter of the step."""
    parts = [part for part in np.array_split(np.arange(len(held)), 4) if len(part)]
    worst = [int(part[held[part].argmax()]) for part in parts]
    return [t for t in worst if held[t] > limit_bytes]


def _bytes_at(problem: Problem, times: Sequence[int]) -> list[Floats]:
    """Bytes of each node's choices, summed over the times."""
    weights = [np.zeros(len(c)) for c in problem.costs]
    for usage in problem.usages:
        hits = sum(usage.first <= t <= usage.last for t in times)
        if hits:
            weights[usage.node] = weights[usage.node] + hits * usage.nbytes
    return weights


def mended_answer(problem: Problem) -> tuple[int, ...]:
    """The cheapest assignment without memory, made to fit and cheaper again node by node, or ().

    Without machine code, and soon done: what a busy machine answers before anything is compiled.
    """
    found: list[tuple[int, ...]] = []
    for most in _MENDED_ENTRIES:
        cheapest = eliminate(replace(problem, usages=()), most).choice
        if np.isfinite(problem.seconds(cheapest)):
            search = _Descent(problem, cheapest)
            if search.mend():
                search.descend()
                found.append(tuple(search.choice))
    return min(found, key=problem.seconds, default=())


class _Descent:
    """Coordinate descent: one node is set anew while all others stay."""

    def __init__(self, problem: Problem, choice: Sequence[int]) -> None:
        self.choice = list(choice)
        self._problem = problem
        self._open = [v for v, c in enumerate(problem.costs) if len(c) > 1]
        self._near: list[list[tuple[int, Floats]]] = [[] for _ in problem.costs]
        for e in problem.edges:
            self._near[e.left].append((e.right, e.table))
            self._near[e.right].append((e.left, e.table.T))
        self._usages: list[list[Usage]] = [[] for _ in problem.costs]
        for usage in problem.usages:
            self._usages[usage.node].append(usage)
        self._held = problem.held_bytes(choice)
        self._most = problem.limit_bytes * (1 + 1e-9)

    def mend(self) -> bool:
        """Make the bytes of rows over the limit dearer, round by round, until none is.

        Each round, the nodes that hold bytes there take the choice that is cheapest at the prices.
        """
        unit = abs(self._problem.seconds(self.choice)) / max(len(self._held), 1)
        unit /= max(self._problem.limit_bytes, 1.0)
        price = np.zeros(len(self._held))
        for _ in range(_MENDS):
            over = self._held > self._most
            if not over.any():
                return True
            price[over] += np.maximum(
                _GROWTH * price[over], unit / max(self._problem.limit_bytes, 1.0)
            )
            before = np.concatenate([[0.0], np.cumsum(price)])
            heavy = np.concatenate([[0], np.cumsum(over)])
            for v in self._open:
                if not any(heavy[u.last + 1] > heavy[u.first] for u in self._usages[v]):
                    continue
                total = self._seconds(v)
                for u in self._usages[v]:
                    total = total + (before[u.last + 1] - before[u.first]) * u.nbytes
                self._set(v, int(total.argmin()))
        return False

    def descend(self) -> None:
        """Take the cheapest choice with which all rows keep the limit, while any node gains."""
        waiting = set(self._open)
        for _ in range(_DESCENTS):
            changed: set[int] = set()
            for v in sorted(waiting):
                total, old = self._seconds(v), self.choice[v]
                for c in np.argsort(total, kind="stable"):
                    if not total[c] < total[old] - _LEAST_GAIN * abs(total[old]):
                        break
                    self._set(v, int(c))
                    if self._fits_around(v):
                        changed.update(w for w, _ in self._near[v])
                        break
                    self._set(v, old)
            waiting = changed.intersection(self._open)

    def _seconds(self, v: int) -> Floats:
        """The seconds of each choice of a node against its neighbors' choices."""
        total = self._problem.costs[v]
        for w, table in self._near[v]:
            total = total + table[:, self.choice[w]]
        return total

    def _set(self, v: int, c: int) -> None:
        old, self.choice[v] = self.choice[v], c
        if c != old:
            for u in self._usages[v]:
                self._held[u.first : u.last + 1] += u.nbytes[c] - u.nbytes[old]

    def _fits_around(self, v: int) -> bool:
        return all(
            float(self._held[u.first : u.last + 1].max()) <= self._most for u in self._usages[v]
        )
