"""Chooses what to compute again for the backward pass instead of keeping it.

A forward value v that the backward pass needs is kept (its bytes, at a price) or made again by
repeating its op o (seconds), and then all that o reads must be there, kept or made again. To keep
a value takes seconds, too, where it is written and read for the backward pass alone:

    minimize   sum_v (price_v * bytes_v + seconds_v) * kept_v + sum_o seconds_o * again_o
    such that  kept_v + again_o(v) >= there_v,   there_v = 1 where v is needed,
               there_u >= again_o                for every u that o reads.

Each term is the cost of one 0/1 variable being above another, so this is a minimum cut and its
relaxation to fractions has whole answers. HiGHS on that took 0.05 s for one price of the unrolled
GPT with 12 layers, the same through PuLP 0.26 s, networkx's minimum_cut 0.3 to 0.6 s; all three
agreed at every price. A higher price keeps less. The price is sought that fits; between the last
price that does not and the first that does, the earliest values pay the higher one: they wait
longest, and no more is repeated than is needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_DECADES = 3  # prices are sought this far around the one at which all bytes cost all seconds
_HALVINGS = 5
_WHOLE = 0.5
_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
_WORSE = 2  # numbers of segments in a row that hold no less
_SEGMENT_PRICES = (1.0, 30.0, 1000.0)  # of what is not kept between segments
_SCALE = 1e4  # of the largest cost, so that the solver's tolerances mean little


@dataclass(frozen=True)
class Kept:
    """A forward value that may wait for the backward pass; with `maker` -1 it must.

    `position` is that of the op that makes it; `seconds` are those that keeping it takes.
    """

    name: str
    nbytes: float
    needed: bool
    maker: int
    position: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Repeat:
    """An op that may run again, and the values that it starts from; others are there anyway."""

    names: tuple[str, ...]
    seconds: float
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Tradeoff:
    """Everything that may be kept or made again."""

    kept: tuple[Kept, ...]
    repeats: tuple[Repeat, ...]

    def cost(self, again: frozenset[int], prices: Sequence[float]) -> float:
        """The cost of repeating these ops, and of keeping what is then needed, at these prices."""
        there = {i for i, v in enumerate(self.kept) if v.needed}
        there.update(u for o in again for u in self.repeats[o].reads)
        kept = (i for i in there if self.kept[i].maker not in again)
        kept_cost = sum(
            prices[i] * self.kept[i].nbytes + self.kept[i].seconds for i in sorted(kept)
        )
        return kept_cost + sum(self.repeats[o].seconds for o in sorted(again))

    def seconds(self, again: frozenset[int]) -> float:
        """Seconds that repeating these ops adds to a step; it may save some."""
        return self.cost(again, self._free) - self._resting_seconds

    @cached_property
    def _free(self) -> Sequence[float]:
        return [0.0] * len(self.kept)

    @cached_property
    def _resting_seconds(self) -> float:
        """Seconds of keeping all that is needed."""
        return self.cost(frozenset(), self._free)

    @cached_property
    def reached(self) -> tuple[int, ...]:
        """Values that the backward pass needs, or might if others are made again."""
        found = {i for i, v in enumerate(self.kept) if v.needed}
        front = sorted(found)
        while front:
            maker = self.kept[front.pop()].maker
            new = [u for u in self.repeats[maker].reads if u not in found] if maker >= 0 else []
            found.update(new)
            front += new
        return tuple(sorted(found))


@dataclass(frozen=True)
class Cut:
    """Ops to repeat, what that takes, and the most bytes that are then held."""

    again: frozenset[int]
    seconds: float
    peak_bytes: float


class Cuts:
    """The cuts of a step, each made and weighed once whatever limit it is tried for.

    `peak` gives the most bytes that are held where some ops are repeated.
    """

    def __init__(self, given: Tradeoff, peak: Callable[[frozenset[int]], float]) -> None:
        self._given, self._peak = given, peak
        self._at_prices: dict[tuple[float, ...], frozenset[int]] = {}
        self._known: dict[frozenset[int], Cut] = {}
        needed = sum(given.kept[i].nbytes for i in given.reached if given.kept[i].needed)
        self._unit = sum(r.seconds for r in given.repeats) / max(needed, 1.0)

    def weighed(self, again: frozenset[int]) -> Cut:
        """The cut that repeats these ops."""
        if again not in self._known:
            self._known[again] = Cut(again, self._given.seconds(again), self._peak(again))
        return self._known[again]

    def cheapest(self, prices: Sequence[float]) -> frozenset[int]:
        """The ops to repeat at a price per byte for each value."""
        given = tuple(prices)
        if given not in self._at_prices:
            self._at_prices[given] = self._relaxation.at(given)
        return self._at_prices[given]

    def within(self, limit_bytes: float) -> Cut | None:
        """The ops to repeat so that a peak is within a limit, or as near as they bring it.

        None where repeating anything holds no less.
        """
        if not (self._given.reached and self._given.repeats):
            return None
        # 1. Prices rise until what is kept fits.
        grid = [10.0 ** (e / 2) for e in range(-2 * _DECADES, 2 * _DECADES + 1)]
        tried: list[Cut] = []
        for i, price in enumerate(grid):
            tried.append(self._cut_at(price, price, 0))
            if tried[-1].peak_bytes <= limit_bytes:
                return self._between_prices(grid[i - 1] if i else 0.0, price, limit_bytes)
        # 2. No price is enough: segments, until more of them hold no less.
        least, worse = math.inf, 0
        for count in _SEGMENTS:
            tried += (cuts := list(self._in_segments(count)))
            held = min((cut.peak_bytes for cut in cuts), default=math.inf)
            least, worse = min(least, held), worse + 1 if held >= least else 0
            if worse == _WORSE:
                break
        fitting = [cut for cut in tried if cut.peak_bytes <= limit_bytes]
        if fitting:
            return min(fitting, key=lambda found: (found.seconds, found.peak_bytes))
        # 3. Nothing is enough: the least that any leaves.
        lowest = min(tried, key=lambda found: (found.peak_bytes, found.seconds))
        return lowest if lowest.peak_bytes < self.weighed(frozenset()).peak_bytes else None

    def _between_prices(self, low: float, high: float, limit_bytes: float) -> Cut:
        """The least that fits between a price that does not and one that does."""
        for _ in range(_HALVINGS):
            middle = (max(low, 1e-3 * high) * high) ** 0.5
            fits = self._cut_at(middle, middle, 0).peak_bytes <= limit_bytes
            low, high = (low, middle) if fits else (middle, high)
        best = self._cut_at(high, high, 0)
        places = sorted({self._given.kept[i].position for i in self._given.reached})
        first, last = 0, len(places)  # values made before places[last] pay the higher price
        while last - first > 1:
            middle_place = (first + last) // 2
            cut = self._cut_at(low, high, places[middle_place])
            if cut.peak_bytes <= limit_bytes:
                last = middle_place
                best = min(best, cut, key=lambda found: found.seconds)
            else:
                first = middle_place
        return best

    def _in_segments(self, count: int) -> Iterator[Cut]:
        """The forward pass in so many segments, at several prices of what lies within them."""
        between = self._between(count)
        for price in _SEGMENT_PRICES if between else ():
            prices = [0.0] * len(self._given.kept)
            for i in self._given.reached:
                prices[i] = 0.0 if i in between else self._unit * price
            yield self._cut(prices)

    def _between(self, count: int) -> frozenset[int]:
        """The values that go from one of so many segments to the next.

        Segments hold about as much as each other; they end where least goes on.
        """
        kept = self._given.kept
        # 1. How much goes over the end of each op to later ones, and how much was made by then.
        places = sorted({kept[i].position for i in self._given.reached})
        last = {i: kept[i].position for i in self._given.reached}
        for repeat, made in zip(self._given.repeats, self._made_at, strict=True):
            last.update((u, max(last[u], made)) for u in repeat.reads if u in last)
        goes, made_bytes = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0.0)
        for i, end in last.items():
            made_bytes[kept[i].position] += kept[i].nbytes
            for place in places[bisect_left(places, kept[i].position) : bisect_left(places, end)]:
                goes[place] += kept[i].nbytes
        # 2. Each segment ends at the narrowest place near to its share of what is made.
        total, so_far = sum(made_bytes.values()), 0.0
        near: dict[int, list[tuple[float, float, int]]] = {}
        for place in places:
            so_far += made_bytes[place]
            share = count * so_far / total if total else 0.0
            off = abs(share - round(share))
            near.setdefault(round(share), []).append((goes[place], off, place))
        ends = [min(near[n])[2] for n in range(1, count) if n in near]
        return frozenset(
            i for i, end in last.items() if any(kept[i].position <= p < end for p in ends)
        )

    @cached_property
    def _made_at(self) -> list[int]:
        """The position of what each op makes."""
        found = [-1] * len(self._given.repeats)
        for value in self._given.kept:
            if value.maker >= 0:
                found[value.maker] = value.position
        return found

    def _cut_at(self, low: float, high: float, before: int) -> Cut:
        """Values made before a position pay the higher price; all the same one where it is 0."""
        kept = self._given.kept
        prices = [0.0] * len(kept)
        for i in self._given.reached:
            early = not before or kept[i].position < before
            prices[i] = self._unit * (high if early else low)
        return self._cut(prices)

    def _cut(self, prices: Sequence[float]) -> Cut:
        return self.weighed(self.cheapest(prices))

    @cached_property
    def _relaxation(self) -> _Relaxation:
        return _Relaxation(self._given)


class _Relaxation:
    """The relaxation with its rows, solved again for other prices from where it stood."""

    def __init__(self, given: Tradeoff) -> None:
        import highspy  # not before memory binds: other steps do without HiGHS

        self._given = given
        makers = (given.kept[i].maker for i in given.reached)
        self._ops = sorted({m for m in makers if m >= 0})
        count = len(given.reached)
        self._again = {o: 2 * count + i for i, o in enumerate(self._ops)}
        self._count = 2 * count + len(self._ops)
        lower = [0.0] * self._count
        lower[:count] = [1.0 if given.kept[i].needed else 0.0 for i in given.reached]
        self._model = highspy.Highs()
        self._model.setOptionValue("output_flag", False)
        self._model.setOptionValue("threads", 1)
        self._model.addVars(self._count, np.array(lower), np.ones(self._count))
        self._add(list(self._rows()))

    def at(self, prices: Sequence[float]) -> frozenset[int]:
        """The ops to repeat at these prices."""
        kept = self._given.kept
        costs = np.zeros(self._count)
        count = len(self._given.reached)
        costs[count : 2 * count] = [
            prices[i] * kept[i].nbytes + kept[i].seconds for i in self._given.reached
        ]
        costs[2 * count :] = [self._given.repeats[o].seconds for o in self._ops]
        costs *= _SCALE / max(float(costs.max(initial=0.0)), 1e-30)
        self._model.changeColsCost(self._count, np.arange(self._count, dtype=np.int32), costs)
        self._model.run()
        values = self._model.getSolution().col_value
        return frozenset(o for o, i in self._again.items() if values[i] > _WHOLE)

    def _rows(self) -> Iterator[list[tuple[int, float]]]:
        """kept - there + again >= 0 for each value; there - again >= 0 for what each op reads."""
        count = len(self._given.reached)
        there = {v: n for n, v in enumerate(self._given.reached)}
        for v, n in there.items():
            maker = self._given.kept[v].maker
            row = [(count + n, 1.0), (n, -1.0)]
            yield [*row, (self._again[maker], 1.0)] if maker >= 0 else row
        for o, column in self._again.items():
            for u in self._given.repeats[o].reads:
                yield [(there[u], 1.0), (column, -1.0)]

    def _add(self, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        entries = [entry for row in rows for entry in row]
        starts = np.cumsum([0, *(len(row) for row in rows[:-1])]).astype(np.int32)
        self._model.addRows(
            len(rows),
            np.zeros(len(rows)),
            np.full(len(rows), np.inf),
            len(entries),
            starts,
            np.array([c for c, _ in entries], dtype=np.int32),
            np.array([w for _, w in entries]),
        )
