"""Keeps a limit that a solver counts in one way and a plan's listing in another.

A solver is given a limit on its memory rows, and answers with a plan. What the plan's listing
holds differs from what the rows counted: by copies that moves make, by what a compiler runs early.
So the limit of the rows is moved by what the listing is over or under, between an allowance that
is known to fit and one that is known not to:

    allowed    |-------- fits ---------|-- not asked --|--- too much ---|
               0                      low             high            (rows)

    over:      high = allowed,  next = allowed - over
    under:     low  = allowed,  next = allowed + what is left, where the limit costs seconds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_TRIES = 6
_LOOSENED = 1  # tries after one that fits
_STEP = 64  # the limit is moved by a part of it at least
_LEFT = 16  # a part of the limit that is worth another try


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A plan, what its listing holds, what it takes, and what the solver says it costs."""

    plan: T
    peak_bytes: int
    seconds: float
    cost: float


@dataclass(frozen=True)
class Fit(Generic[T]):
    """The fastest plan within a limit, or None, and the fewest bytes that any plan held."""

    best: Candidate[T] | None
    fewest_bytes: float


def fit_within(
    limit_bytes: int,
    solve: Callable[[int], Candidate[T] | None],
    bound: float = float("inf"),
    first: Candidate[T] | None = None,
) -> Fit[T]:
    """The fastest plan found whose listing keeps the limit.

    `solve` gives the cheapest plan of which no more than so many bytes are counted, None where
    there is none. `first` is its answer for the limit itself, where that is known. A plan that
    costs no more than `bound`, what a plan without a limit costs, is not bettered by more room.
    """
    allowed, high, least = limit_bytes, float("inf"), float("inf")
    best: Candidate[T] | None = None
    loosened = 0
    for _ in range(_TRIES):
        found, first = first or solve(allowed), None
        if found is None:
            break
        least = min(least, found.peak_bytes)
        left = limit_bytes - found.peak_bytes
        if left < 0:
            if best is not None:  # what was tried beside it
                break
            high = allowed
            allowed -= max(-left, limit_bytes // _STEP)
            if allowed <= 0:
                break
            continue
        if best is None or found.seconds < best.seconds:
            best = found
        wider = min(allowed + left, (allowed + high) / 2)
        worth = wider - allowed >= limit_bytes // _LEFT and found.cost > bound
        if not worth or loosened == _LOOSENED:
            break
        allowed, loosened = int(wider), loosened + 1
    return Fit(best, least)
