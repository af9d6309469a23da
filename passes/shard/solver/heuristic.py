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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.shard.solver.elimination import eliminate
from autopar.passes.shard.solver.problem import Floats, Problem

_FIRST_SHARE = 0.25  # of the seconds, what the peak's bytes are worth at the first price
_DEARER = 4.0  # times the price while nothing fits
_ENTRIES = 20_000_000  # of all joint tables of an elimination: some 50 ms
_WIDEST = 1_000_000  # and of one


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
    return first_answer(problem).choice


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
