"""The outcome of a solver: status, cost of the answer, proven bound, one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopar.ir.text import show_seconds


class Status(Enum):
    """The way in which a search ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"  # an answer with a proven gap
    FIXED = "fixed"  # nothing was left to decide


@dataclass(frozen=True)
class Margin:
    """The cost of a recipe beside the answer: its seconds, or None and why there are none."""

    name: str
    seconds: float | None
    note: str


@dataclass(frozen=True)
class Outcome:
    """Seconds of the answer, a proven lower bound on any answer, and a sentence.

    `recipes` are the textbook strategies that the answer was measured against. The memory price
    is what one more byte a device would save in each step; 0 where memory does not bind.
    """

    status: Status
    seconds: float
    bound_seconds: float
    sentence: str
    recipes: tuple[Margin, ...] = ()
    memory_price_seconds_per_byte: float = 0.0

    @property
    def gap(self) -> float:
        """The distance of the answer from the best, at most, as a share of the answer."""
        if self.seconds <= 0:
            return 0.0
        return max(0.0, (self.seconds - self.bound_seconds) / self.seconds)

    def __str__(self) -> str:
        return (
            f"{self.status.value}: {show_seconds(self.seconds)}, "
            f"bound {show_seconds(self.bound_seconds)}, gap {self.gap:.2%}. {self.sentence}"
        )
