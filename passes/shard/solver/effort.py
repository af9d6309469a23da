"""Limits of a search: work by count, seconds by a clock that is handed in, or both.

A unit of work is some 100,000 table entries looked at, a millisecond or less. With work alone, the
same problem and seed give the same answer on every machine, however busy it is: so plans are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]


def no_clock() -> float:
    """The clock of a search that is limited by work alone."""
    return 0.0


@dataclass(frozen=True)
class Effort:
    """Limits in seconds and in work; without either, as much work as the problem's size asks for.

    A quick effort takes the first good answer and leaves it unproven.
    """

    seconds: float | None = None
    work: int | None = None
    quick: bool = False


FULL = Effort()
QUICK = Effort(quick=True)


class Meter:
    """Counts what of an effort is spent; the seconds run from `start` by the clock."""

    def __init__(self, effort: Effort, clock: Clock, start: float | None = None) -> None:
        self.effort = effort
        self._clock = clock
        self._start = clock() if start is None else start
        self.work = 0.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    def spend(self, entries: float) -> None:
        """Count work by the table entries looked at."""
        self.work += entries / 1e5

    @property
    def share(self) -> float:
        """The greater share of the two limits that is used up; 0 where there is none."""
        shares = [0.0]
        if self.effort.seconds is not None:
            shares.append(self.seconds / max(self.effort.seconds, 1e-9))
        if self.effort.work is not None:
            shares.append(self.work / max(self.effort.work, 1))
        return max(shares)

    def until(self, share: float) -> float:
        """The share at which so much of what is left now will be used up."""
        return self.share + share * (1 - self.share)
