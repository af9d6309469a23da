"""Draws that a seed decides, the same with every NumPy and on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draw:
    """Choices from a seed: NumPy promises the raw words of PCG64, and no more is used."""

    def __init__(self, *seed: int) -> None:
        self._words = np.random.PCG64(np.random.SeedSequence(seed))

    def below(self, count: int) -> int:
        """A whole number from 0 to `count` - 1."""
        return int(self._words.random_raw()) % count

    def chance(self, share: float) -> bool:
        """True in that share of all draws."""
        return self.below(10_000) < share * 10_000

    def one(self, options: Sequence[T]) -> T:
        """One of the options, each as likely; an option that stands there twice is likelier."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> tuple[T, ...]:
        """So many different options, in the order in which they were drawn."""
        left = list(options)
        return tuple(left.pop(self.below(len(left))) for _ in range(min(count, len(left))))

    def seed(self) -> int:
        """A seed for draws of their own."""
        return self.below(2**31)
