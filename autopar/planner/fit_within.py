"""The memory limit, and the one loop that keeps it.

A pass is given a limit on the bytes that it counts, and answers with a plan. What the plan's
listing holds differs from what was counted: by copies that moves make, by what a compiler runs
early. So a plan is made, weighed and made again, and what is allowed moves by what the listing is
over or under, up to an allowance that is known to be too much:

    allowed    |------ fits ------|----- not tried -----|----- too much -----|
               0               allowed                 high              (counted)

    over:      high = allowed,  next = allowed - over; twice the last step for the same plan again;
               less than the plan's own bytes, where they are known
    under:     next = allowed + what is left, at most half way to high, if the limit costs seconds;
               high is known from what is counted of a plan without a limit

Those that plan within a limit, and what each counts:

    memory_fit           one program: the memory rows of the sharding pass, for every form of the
                         step, recomputed ones too
    submesh_sharding     the stages of a submesh: the memory rows of all their parts
    reshardable_unit     `why-not` and `explain`: the memory rows around what is asked about

The stage search counts for itself, by the prices of layers, before anything is built: in
`passes/stage`, `Recurrence.bears` leaves out what no schedule can hold, and the simulator has the
last word; what a built stage then holds over its price is set aside by `stage_search`. Stages that
are folded into one program are held against the limit once more, as that holds more: `Spmd` in
`passes/lower/lowering.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

TRIES = 6
_LOOSENED = 1  # tries after one that fits
_STEP = 64  # the allowance is moved by a part of the limit at least
_LEFT = 16  # a part of the limit that is worth another try
_CLOSE = 0.005  # of the cost without a limit


class Candidate(Protocol):
    """A plan: what its listing holds, what it takes, and what the solver says it costs."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds."""
        ...

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        ...

    @property
    def cost(self) -> float:
        """The sum that the solver minimized, in seconds."""
        ...


T = TypeVar("T", bound=Candidate)


@dataclass(frozen=True)
class Fit(Generic[T]):
    """The fastest plan within a limit, or None, and the fewest bytes that any plan held."""

    best: T | None
    fewest_bytes: float


def fits(plan: Candidate, limit_bytes: int) -> bool:
    """True if a plan keeps the limit."""
    return plan.peak_bytes <= limit_bytes


def fit_within(
    limit_bytes: int,
    solve: Callable[[int], T | None],
    roomy: Iterable[T | None] = (),
    first: T | None = None,
    lightest: Iterable[T | None] = (),
    tries: int = TRIES,
    counted: Callable[[T], float] | None = None,
) -> Fit[T]:
    """The fastest plan found whose listing keeps the limit.

    `solve` gives the cheapest plan of which no more than so many bytes are counted, None where
    there is none; `first` is its answer for the limit itself, where that is known. `roomy` are
    plans made without a limit, the preferred first, and `lightest` those that hold the least:
    neither is made before it is asked for. `counted` gives the bytes that `solve` counts of a
    plan, where that is known: no allowance down to them has another plan, and none from those of a
    plan without a limit on has a dearer one.
    """
    least = float("inf")
    # 1. A plan made without a limit may keep it.
    bound = float("inf")
    over = list[T]()
    for plan in roomy:
        if plan is None:
            continue
        if fits(plan, limit_bytes):
            return Fit(plan, plan.peak_bytes)
        least, bound = min(least, plan.peak_bytes), min(bound, plan.cost * (1 + _CLOSE))
        over.append(plan)
    # 2. The cheapest that keeps it as it is counted, and again with another allowance. A plan
    #    that costs no more than one without a limit is not bettered by more room.
    best: T | None = None
    allowed, high, loosened = limit_bytes, float("inf"), 0
    last: T | None = None
    step = 0
    for _ in range(tries):
        found, first = first or solve(allowed), None
        if found is None:
            break
        least = min(least, found.peak_bytes)
        left = limit_bytes - found.peak_bytes
        if left < 0:
            if best is not None:  # what was tried beside it
                break
            high = allowed
            step = 2 * step if last and _alike(found, last) else max(-left, limit_bytes // _STEP)
            allowed, last = allowed - step, found
            if counted is not None:
                allowed = int(min(allowed, counted(found) - 1))
            if allowed <= 0:
                break
            continue
        if best is None or found.seconds < best.seconds:
            best = found
        if loosened == _LOOSENED or found.cost <= bound or left < limit_bytes // _LEFT:
            break
        if counted is not None:
            high = min([high, *map(counted, over)])
        wider = min(allowed + left, (allowed + high) / 2)
        if wider - allowed < limit_bytes // _LEFT:
            break
        allowed, loosened = int(wider), loosened + 1
    # 3. The last resort: so its bytes are a limit that will do.
    if best is None:
        for plan in lightest:
            if plan is None:
                continue
            least = min(least, plan.peak_bytes)
            if fits(plan, limit_bytes):
                return Fit(plan, least)
    return Fit(best, least)


def _alike(plan: Candidate, other: Candidate) -> bool:
    """True if two plans hold and cost the same, to the byte and the last digit."""
    return (plan.peak_bytes, plan.cost) == (other.peak_bytes, other.cost)
