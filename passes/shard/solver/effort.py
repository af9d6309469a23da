"""Limits of a search: work by count, or a deadline that is the caller's.

A unit of work is some 100,000 table entries looked at, a millisecond or less. With work alone, the
same problem and seed give the same answer on every machine, however busy it is: so plans are made.
A search that something else ends is given an `AbstractDeadline`; `benchmarks/iopddl.py` has that of
a contest, which is by the clock.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

# Table entries that a chunk of a search in turns has at least and at most.
FEWEST_ENTRIES, MOST_ENTRIES = 20_000, 100_000_000


@dataclass(frozen=True)
class Effort:
    """The work of a search; without a number, as much as the problem's size asks for.

    A quick effort takes the first good answer and leaves it unproven.
    """

    work: int | None = None
    quick: bool = False


FULL = Effort()
QUICK = Effort(quick=True)


class AbstractMeter(abc.ABC):
    """The share of a search that is spent.

    `work` are the units that there are in all, 0 where it is not work that ends the search.
    """

    work: float
    quick: bool

    @abc.abstractmethod
    def spend(self, entries: float) -> None:
        """Count work by the table entries looked at."""

    @property
    @abc.abstractmethod
    def share(self) -> float:
        """The share that is spent so far."""

    @abc.abstractmethod
    def chunks(self, share: float, parts: int) -> Iterator[int]:
        """The table entries of each chunk, where so large a share is spent in some parts."""

    @abc.abstractmethod
    def answered(self) -> None:
        """Take note that the search has a first answer."""

    def until(self, share: float) -> float:
        """The share at which so much of what is left now will be spent."""
        return self.share + share * (1 - self.share)


class WorkMeter(AbstractMeter):
    """Counts the work that is spent."""

    def __init__(self, work: float, quick: bool = False) -> None:
        self.work, self.quick = work, quick
        self._spent = 0.0

    def spend(self, entries: float) -> None:
        """Count work by the table entries looked at."""
        self._spent += entries / 1e5

    @property
    def share(self) -> float:
        """The share of the work that is spent."""
        return self._spent / max(self.work, 1)

    def chunks(self, share: float, parts: int) -> Iterator[int]:
        """Equal chunks."""
        return repeat(bounded(share * self.work * 1e5 / parts))

    def answered(self) -> None:
        """Nothing: work is counted whatever is found."""


class AbstractDeadline(abc.ABC):
    """The end of a search that comes by itself: an answer is wanted before, and soon."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """True if the search has to end now."""

    @abc.abstractmethod
    def answered(self) -> None:
        """Take note that the search has a first answer."""

    @abc.abstractmethod
    def builds(self, build: Callable[[], None]) -> bool:
        """True if the search's machine code is there in time, once `build` has run."""

    @abc.abstractmethod
    def meter(self) -> AbstractMeter:
        """The meter of all that the search may still spend."""


def bounded(entries: float) -> int:
    """Table entries within what a chunk may have."""
    return int(min(max(entries, FEWEST_ENTRIES), MOST_ENTRIES))
