"""The dual of a problem with memory rows: prices on rows and messages on edges, ever a bound.

Prices move by a power of how far a row is over or under its limit, on a running average of the
assignments read off the messages: a row over its limit gets dearer, one under it cheaper. That
needs no scale of its own, and follows a price over many orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.passes.shard.solver.flat import Flat, Flattened, Ints
from autopar.passes.shard.solver.messages import (
    held_rows,
    pass_messages,
    priced_costs,
    total_cost,
    widest,
)
from autopar.passes.shard.solver.problem import Floats

_FIRST_PASSES = 10
_FIRST_POWER, _LEAST_POWER = 0.5, 1e-4
_PATIENCE = 20  # steps without a better bound before prices start again from the best
_CUT = 0.6
_WARM = 60  # first steps, on which the prices may find their scale
_MEMORY = 0.5  # weight of the past in the average
_FIRST_SHARE = 1e-3  # of the cost, what the limit is worth at the first prices
_WORTHWHILE = 1e-6


@dataclass(frozen=True)
class Read:
    """An assignment read off the messages at some step: its cost, and whether it fits."""

    choice: Ints
    cost: float
    fits: bool


class Ascent:
    """The dual while it rises; `bound` and `prices` are the best so far."""

    def __init__(self, flattened: Flattened) -> None:
        self._flat: Flat = flattened.arrays
        self._messages = np.zeros(flattened.message_count)
        self._scratch = np.zeros(2 * widest(self._flat))
        self._priced: Floats = self._flat.costs.copy()
        self._choice = np.zeros(len(self._flat.choices) - 1, dtype=np.int64)
        self._held = np.zeros(len(self._flat.slack), dtype=np.int64)
        self._room = np.maximum(self._flat.slack.astype(np.float64), 1.0)
        self._power = _FIRST_POWER
        self._stale = -_WARM
        self._average = np.zeros(0)
        self.bound = -np.inf
        self.prices = np.zeros(len(self._held))
        self.nearest: Ints = self._choice
        self._now = np.zeros(len(self._held))
        for _ in range(_FIRST_PASSES):
            self._pass()
        worth = _FIRST_SHARE * max(abs(self.bound), 1e-30)
        self._now = np.full(len(self._held), worth / max(float(self._room.sum()), 1.0))
        self._stale = -_WARM

    @property
    def entries_a_step(self) -> int:
        """Table entries that a step looks at."""
        return 2 * len(self._flat.entries) + len(self._flat.costs)

    @property
    def settled(self) -> bool:
        """True if the steps have become too small to gain anything."""
        return self._power < _LEAST_POWER

    def steps(self) -> Iterator[Read]:
        """Raise the bound step by step until it is settled."""
        while not self.settled:
            priced_costs(self._flat, sums_before(self._now), self._priced)
            yield self._pass()
            self._move()

    def priced(self) -> list[Floats]:
        """The costs of each node's choices with their bytes paid for at the best prices."""
        priced_costs(self._flat, sums_before(self.prices), self._priced)
        return np.split(self._priced.copy(), self._flat.choices[1:-1])

    def _pass(self) -> Read:
        """A pass there and back at the prices in force; the bound is kept if it is the best."""
        pass_messages(self._flat, self._priced, self._messages, self._choice, self._scratch, True)
        bound = pass_messages(
            self._flat, self._priced, self._messages, self._choice, self._scratch, False
        )
        bound -= float(self._now @ self._flat.slack)
        self._stale += 1
        if bound > self.bound:
            if bound > self.bound + _WORTHWHILE * abs(bound):
                self._stale = min(self._stale, 0)
            self.bound, self.prices = bound, self._now
            self.nearest = self._choice.copy()
        self._held = held_rows(self._flat, self._choice)
        fits = bool((self._held <= self._flat.slack).all())
        return Read(self._choice, total_cost(self._flat, self._choice), fits)

    def _move(self) -> None:
        """The prices of the next step."""
        now = self._now
        if self._stale > _PATIENCE:
            self._power *= _CUT
            self._stale = 0
            now = self.prices
        over = (self._held - self._flat.slack) / self._room
        fresh = self._average.size == 0
        self._average = over if fresh else _MEMORY * self._average + (1 - _MEMORY) * over
        self._now = now * np.exp(self._power * np.clip(self._average, -1, 1))


def sums_before(prices: Floats) -> Floats:
    """The sum of the prices before each row, and of all."""
    return np.concatenate([[0.0], np.cumsum(prices)])
