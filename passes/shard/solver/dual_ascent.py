"""The dual of a problem with memory rows: prices on rows and messages on edges, ever a bound.

1. Messages: sequential tree-reweighted message passing (TRW-S; Kolmogorov, 2006) on the costs with
   priced memory. A pass sends each node's share of its belief to the neighbors that come later, or
   earlier.
2. Prices move by a power of how far a row is over or under its limit, on a running average of the
   assignments read off the messages: a row over its limit gets dearer, one under it cheaper. That
   needs no scale of its own, and follows a price over many orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.passes.compiled import compiled, internal
from autopar.passes.shard.solver.problem import Csr, CsrForm, Floats, Ints


def held_rows(csr: Csr, choice: Ints) -> Ints:
    """Bytes beyond the least that an assignment holds at each row."""
    change = np.zeros(len(csr.slack) + 1, dtype=np.int64)
    held_changes(csr, choice, change)
    held: Ints = np.cumsum(change)[:-1]
    return held


def widest(csr: Csr) -> int:
    """The most choices of a node."""
    return int(np.diff(csr.choices).max(initial=1))


@compiled
def priced_costs(csr: Csr, running: Floats, priced: Floats) -> None:
    """Costs with every choice's bytes priced; `running` sums the prices before each row."""
    for v in range(len(csr.choices) - 1):
        first, count = csr.choices[v], csr.choices[v + 1] - csr.choices[v]
        for c in range(count):
            priced[first + c] = csr.costs[first + c]
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            price = running[csr.lasts[h]] - running[csr.firsts[h]]
            if price > 0.0:
                at = csr.nbytes_at[h]
                for c in range(count):
                    priced[first + c] += price * csr.nbytes[at + c]


@compiled
def pass_messages(
    csr: Csr,
    priced: Floats,
    messages: Floats,
    choice: Ints,
    margins: Floats,
    room: Floats,
    forward: bool,
) -> float:
    """Send messages in a pass over the nodes; `choice` becomes the assignment read off on the way.

    `room` is scratch for two nodes of the most choices.
    Returns a lower bound on every assignment's priced cost where the pass before ran the other
    way at the same prices: what all nodes and messages were worth at their least.
    """
    bound = 0.0
    count = len(csr.choices) - 1
    widest = len(room) // 2
    for i in range(count):
        v = i if forward else count - 1 - i
        first, width = csr.choices[v], csr.choices[v + 1] - csr.choices[v]
        for c in range(width):
            room[c] = priced[first + c]
            room[widest + c] = priced[first + c]
        later = 0
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            w, inbox = csr.ends[a], csr.inbox[a]
            for c in range(width):
                room[c] += messages[inbox + c]
            if (w > v) == forward:
                later += 1
                for c in range(width):
                    room[widest + c] += messages[inbox + c]
            else:
                at = csr.tables[a] + choice[w] * width
                for c in range(width):
                    room[widest + c] += csr.entries[at + c]
        best, least = 0, room[0]
        for c in range(1, width):
            if room[widest + c] < room[widest + best]:
                best = c
            least = min(least, room[c])
        choice[v] = best
        degree = csr.arcs[v + 1] - csr.arcs[v]
        share = 1.0 / max(1, later, degree - later)
        bound += least
        for c in range(width):
            room[c] -= least
            margins[first + c] = room[c]
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            if (csr.ends[a] > v) == forward:
                bound += _send(csr, messages, a, room, width, share)
    return bound


@internal
def _send(csr: Csr, messages: Floats, a: int, room: Floats, width: int, share: float) -> float:
    """The message of an arc's own node to its other end, less its least entry, which it returns."""
    w, widest = csr.ends[a], len(room) // 2
    inbox, outbox = csr.inbox[a], csr.inbox[csr.back[a]]
    for c in range(width):
        room[widest + c] = share * room[c] - messages[inbox + c]
    least = 1e300
    own = room[widest : widest + width]
    for d in range(csr.choices[w + 1] - csr.choices[w]):
        at = csr.tables[a] + d * width
        row = csr.entries[at : at + width]
        lowest = own[0] + row[0]
        for c in range(1, width):
            lowest = min(lowest, own[c] + row[c])
        messages[outbox + d] = lowest
        least = min(least, lowest)
    for d in range(csr.choices[w + 1] - csr.choices[w]):
        messages[outbox + d] -= least
    return least


@compiled
def held_changes(csr: Csr, choice: Ints, change: Ints) -> None:
    """Add how the bytes beyond the least that an assignment holds change at each row."""
    for v in range(len(csr.choices) - 1):
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            nbytes = csr.nbytes[csr.nbytes_at[h] + choice[v]]
            change[csr.firsts[h]] += nbytes
            change[csr.lasts[h]] -= nbytes


@compiled
def total_cost(csr: Csr, choice: Ints) -> float:
    """Node costs and edge entries of an assignment."""
    total = 0.0
    for v in range(len(csr.choices) - 1):
        width = csr.choices[v + 1] - csr.choices[v]
        total += csr.costs[csr.choices[v] + choice[v]]
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            if csr.ends[a] > v:
                total += csr.entries[csr.tables[a] + choice[csr.ends[a]] * width + choice[v]]
    return float(total)


_FIRST_PASSES = 10
_FIRST_POWER, _LEAST_POWER = 0.5, 1e-4
_PATIENCE = 20  # steps without a better bound before prices start again from the best
_CUT = 0.6
_WARM = 60  # first steps, on which the prices may find their scale
_MEMORY = 0.5  # weight of the past in the average
_FIRST_SHARE = 1e-3  # of the cost, what the limit is worth at the first prices
_WORTHWHILE = 1e-6
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Read:
    """An assignment read off the messages at some step: its cost, and whether it fits."""

    choice: Ints
    cost: float
    fits: bool


class DualAscent:
    """The dual while it rises; `bound` and `prices` are the best so far."""

    def __init__(self, form: CsrForm) -> None:
        self._csr: Csr = form.arrays
        self._messages = np.zeros(form.message_count)
        self._margins = np.zeros(len(self._csr.costs))
        self._scratch = np.zeros(2 * widest(self._csr))
        self._priced: Floats = self._csr.costs.copy()
        self._choice = np.zeros(len(self._csr.choices) - 1, dtype=np.int64)
        self._held = np.zeros(len(self._csr.slack), dtype=np.int64)
        self._room = np.maximum(self._csr.slack.astype(np.float64), 1.0)
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
        return 2 * len(self._csr.entries) + len(self._csr.costs)

    @property
    def settled(self) -> bool:
        """True if the steps have become too small to gain anything."""
        return self._power < _LEAST_POWER

    def steps(self) -> Iterator[Read]:
        """Raise the bound step by step until it is settled."""
        while not self.settled:
            priced_costs(self._csr, sums_before(self._now), self._priced)
            yield self._pass()
            self._move()

    def left_below(self, cost: float) -> tuple[Ints, ...]:
        """By node the choices that may be part of an assignment that fits and costs no more.

        In a pass, a node's messages tell by how much the bound rises if it takes each choice (the
        min-marginals of the trees through it). What would lift the bound above the cost goes.
        """
        priced_costs(self._csr, sums_before(self.prices), self._priced)
        paid = cost + float(self.prices @ self._csr.slack)
        limit = paid + _ROUNDING * abs(paid)
        there = np.ones(len(self._priced), dtype=np.bool_)
        self._send(forward=True)
        bound = self._send(forward=False)
        for _ in range(_FIRST_PASSES):
            for forward in (True, False):
                risen = self._send(forward)
                there &= bound + self._margins <= limit
                bound = max(bound, risen)
        left = np.split(there, self._csr.choices[1:-1])
        return tuple(np.flatnonzero(few) for few in left)

    def _send(self, forward: bool) -> float:
        """A pass of messages; its bound on the priced costs."""
        return pass_messages(
            self._csr, self._priced, self._messages, self._choice, self._margins, self._scratch,
            forward,
        )  # fmt: skip

    def _pass(self) -> Read:
        """A pass there and back at the prices in force; the bound is kept if it is the best."""
        self._send(forward=True)
        bound = self._send(forward=False) - float(self._now @ self._csr.slack)
        self._stale += 1
        if bound > self.bound:
            if bound > self.bound + _WORTHWHILE * abs(bound):
                self._stale = min(self._stale, 0)
            self.bound, self.prices = bound, self._now
            self.nearest = self._choice.copy()
        self._held = held_rows(self._csr, self._choice)
        fits = bool((self._held <= self._csr.slack).all())
        return Read(self._choice, total_cost(self._csr, self._choice), fits)

    def _move(self) -> None:
        """The prices of the next step."""
        now = self._now
        if self._stale > _PATIENCE:
            self._power *= _CUT
            self._stale = 0
            now = self.prices
        over = (self._held - self._csr.slack) / self._room
        fresh = self._average.size == 0
        self._average = over if fresh else _MEMORY * self._average + (1 - _MEMORY) * over
        self._now = now * np.exp(self._power * np.clip(self._average, -1, 1))


def sums_before(prices: Floats) -> Floats:
    """The sum of the prices before each row, and of all."""
    return np.concatenate([[0.0], np.cumsum(prices)])
