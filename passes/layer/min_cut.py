"""Layers of even work, cut where little crosses (Alpa, OSDI 2022, section 5.2).

Repeated blocks, runs of ops that come again and again, are layers by themselves if nothing else is
asked for:

    ops     e a b c a b c a b c h       signatures; e, h: embedding and head
    shift 3       a b c a b c           keys[:-3] == keys[3:] holds for 6 ops in a row
    repeat        start 1, period 3, count 3

Of all periods the one whose blocks hold most of the FLOPs is taken; then the same on either side.
Else a dynamic program over the places where a cut is cheap, in two passes over [i, j], the ops
between cuts i and j:

    B(n, j) = min over i of max(B(n-1, i), cost(j))     for work(i, j) <= (1 + balance) mean
    S(n, j) = min over i of S(n-1, i) + work(i, j)^2    and cost(j) <= B(count, end)

So the largest cut is as small as it can be, and among such cuts the work is as even as it can be.
Ops stay in the order of the trace, which is topological, so that a cut is a place in it: no graph
is sorted, no dominator and no min cut is looked for, and networkx has nothing to do here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from autopar.ir.batching import Batching
from autopar.ir.stages import LayerSequence
from autopar.ir.values import Role
from autopar.passes.base import AbstractLayering, Setting, Single
from autopar.passes.layer.forward_pass import Forward, Ints, forward_of
from autopar.passes.layer.isomorphism import signature
from autopar.passes.layer.sequence import layers_from

# Blocks that hold less of the work than this are no structure of the model.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Repeat:
    """Equal blocks one after the other: `count` of them, `period` ops each, from `start`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The end of the last block."""
        return self.start + self.period * self.count

    @property
    def bounds(self) -> range:
        """The first op of each block, and the end of the last."""
        return range(self.start, self.stop + 1, self.period)


def find_repeats(forward: Forward) -> tuple[Repeat, ...]:
    """The repeated blocks in order; positions count the forward ops.

    The blocks that hold most of the FLOPs come first, then those of what is left on either side.
    Of the places where the first block may start, the one whose boundaries cost least is taken.
    """
    # Equal ops have equal numbers, so that shifts are compared by numpy.
    numbers: dict[Hashable, int] = {}
    keys = [numbers.setdefault(signature(op, forward.graph), len(numbers)) for op in forward.ops]
    search = _RepeatSearch(np.array(keys, dtype=np.int64), forward)
    return tuple(search.within(0, len(keys)))


class _RepeatSearch:
    def __init__(self, keys: Ints, forward: Forward) -> None:
        self._keys = keys
        # A cut after op i costs _cut[i + 1]; before the first and after the last it is free.
        self._cut = np.concatenate([[0], forward.crossing])
        self._work = np.concatenate([[0], np.cumsum(forward.flops)])
        # True where another module begins with an op, and at both ends.
        modules = pairwise(op.origin.module for op in forward.ops)
        self._modules = np.array([True, *(a != b for a, b in modules), True], dtype=np.bool_)

    def within(self, first: int, stop: int) -> Iterator[Repeat]:
        """The repeats of a range, in order."""
        best = self._largest(first, stop)
        if best is not None:
            yield from self.within(first, best.start)
            yield best
            yield from self.within(best.stop, stop)

    def _largest(self, first: int, stop: int) -> Repeat | None:
        """The repeat that holds most of the work; the shortest blocks of equals."""
        keys, found = self._keys[first:stop], None
        most = _LEAST_SHARE * self._work[-1]
        # keys[k] == keys[k + period] for a run of at least a period: blocks of that period.
        for period in range(1, len(keys) // 2 + 1):
            start, length = _longest_run(keys[:-period] == keys[period:])
            if length < period:
                continue
            repeat = self._align(first + start, first + start + length + period, period)
            work = self._work[repeat.stop] - self._work[repeat.start]
            if work > most:
                found, most = repeat, work
        return found

    def _align(self, start: int, stop: int, period: int) -> Repeat:
        """The blocks of a periodic range, begun where cuts cost least and modules begin."""

        def cost(repeat: Repeat) -> tuple[int, int, int]:
            bounds = list(repeat.bounds)
            return int(self._cut[bounds].sum()), -int(self._modules[bounds].sum()), repeat.start

        # The run is longer than its blocks: they may start at any offset that is left.
        count = (stop - start) // period
        offsets = range(start, stop - count * period + 1)
        return min((Repeat(offset, period, count) for offset in offsets), key=cost)


def _longest_run(equal: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The start and the length of the longest run of true; the first of equals."""
    breaks = np.concatenate([[-1], np.flatnonzero(~equal), [len(equal)]])
    lengths = np.diff(breaks) - 1
    longest = int(np.argmax(lengths))
    return int(breaks[longest]) + 1, int(lengths[longest])


Floats = npt.NDArray[np.float64]

_MOST_CANDIDATES = 512
# A stretch beside repeated blocks is a layer of its own from this share of a block's work or
# parameters on.
_OWN_SHARE = 0.1
# Without repeated blocks: the most layers, and one layer at most for each op with this share.
_MOST_LAYERS, _HEAVY_SHARE = 12, 0.02


@dataclass(frozen=True)
class MinCut(AbstractLayering):
    """Cuts so many layers, or as many as the model's structure suggests.

    No layer has more FLOPs than (1 + balance) times the mean, if any cuts allow that.
    """

    name: ClassVar[str] = "min-cut"
    layers: int | None = None
    balance: float = 0.5

    def run(self, given: Batching, setting: Setting) -> LayerSequence:
        """The layers; one of all ops for a step without a forward pass."""
        forward = forward_of(given)
        if not forward.positions:
            return Single().run(given, setting)
        # 1. Repeated blocks, if the model has any.
        blocks = _blocks(forward, find_repeats(forward))
        if self.layers is None and len(blocks) > 1:
            return layers_from(given, forward, blocks)
        # 2. Else the dynamic program, for the number asked for or one for each heavy op.
        heavy = int((forward.flops > _HEAVY_SHARE * forward.flops.sum()).sum())
        count = self.layers if self.layers is not None else max(1, min(_MOST_LAYERS, heavy))
        return layers_from(given, forward, self._starts(forward, count, blocks))

    def _starts(self, forward: Forward, count: int, blocks: Sequence[int]) -> list[int]:
        """The first ops of layers: between repeated blocks if these make layers even enough."""
        # Cuts between blocks are tried first; if they are too uneven, other cheap places join them.
        places = blocks[1:]
        limit = (1 + self.balance) * forward.flops.sum() / count
        if len(blocks) < count or _least_largest(_segments(forward.flops, places), count) > limit:
            places = sorted({*_cheap_places(forward.crossing), *blocks[1:]})
        count = min(count, len(places) + 1)
        return [0, *cheapest_cuts(forward.flops, forward.crossing, places, count, self.balance)]


# -- structure ---------------------------------------------------------------------------------


def _blocks(forward: Forward, repeats: Sequence[Repeat]) -> list[int]:
    """The first ops of blocks: the repeated ones, and the stretches around them that are large."""
    if not repeats:
        return [0]
    graph = forward.graph
    # 1. Bytes of parameters, also through ops that run once and leave half of them at least, such
    #    as a cast.
    state = {i.value.name: i.value.nbytes for i in graph.inputs if i.role is Role.STATE}
    for i, (op, moment) in enumerate(zip(graph.ops, forward.moments, strict=True)):
        nbytes = max((state[n] for n in op.value_operands if n in state), default=0)
        if nbytes and not moment.loops and i <= forward.positions[-1]:
            state.update((r.name, nbytes) for r in op.results if r.nbytes >= nbytes // 2)
    # 2. FLOPs and bytes of parameters of the blocks and of the stretches between them.
    inner = [bound for repeat in repeats for bound in repeat.bounds]
    starts = sorted({0, *inner} - {len(forward.positions)})
    weights: list[Ints] = []
    for start, stop in pairwise([*starts, len(forward.positions)]):
        ops = (graph.ops[i] for i in forward.positions[start:stop])
        read = dict.fromkeys(n for op in ops for n in op.value_operands)
        nbytes = sum(state.get(n, 0) for n in read)
        weights.append(np.array([forward.flops[start:stop].sum(), nbytes], dtype=np.int64))
    # 3. A head or an embedding stands alone if it has a tenth of a block's work or parameters. A
    #    smaller stretch joins the one before it; at the very beginning the one after.
    weighed = list(zip(starts, weights, strict=True))
    repeated = {bound for repeat in repeats for bound in list(repeat.bounds)[:-1]}
    least = _OWN_SHARE * np.mean([w for start, w in weighed if start in repeated], axis=0)
    kept = [start for start, w in weighed if start in repeated or (w > least).any()]
    return [0, *kept[1:]]


def _cheap_places(crossing: Ints) -> list[int]:
    """Places for cuts: nothing beside them costs less; the cheapest where there are many."""
    cost = crossing[:-1]
    if not len(cost):
        return []
    before = np.concatenate([[np.iinfo(np.int64).max], cost[:-1]])
    after = np.concatenate([cost[1:], [np.iinfo(np.int64).max]])
    # Of a level stretch the last place is taken.
    places = np.flatnonzero((cost <= before) & (cost < after)) + 1
    order = np.lexsort((places, cost[places - 1]))[:_MOST_CANDIDATES]
    return cast("list[int]", np.sort(places[order]).tolist())


# -- the dynamic program -----------------------------------------------------------------------


def cheapest_cuts(
    flops: Ints, crossing: Ints, places: Sequence[int], count: int, balance: float
) -> list[int]:
    """`count` - 1 of the places: the largest cut least, then the squares of the work least.

    A cut at place i lies before op i and costs `crossing[i - 1]`. A layer may have (1 + balance)
    times the mean work, or as much as the evenest layers need.
    """
    work = _segments(flops, places)
    allowed = work <= max((1 + balance) * flops.sum() / count, _least_largest(work, count))
    cost = np.array([*crossing[np.array(places, dtype=np.int64) - 1], 0], dtype=np.float64)
    # 1. The least largest cut.
    bottleneck, _ = _best(np.where(allowed, cost[None, :], np.inf), count, np.maximum)
    # 2. Among cuts no larger, the least sum of squares.
    mean = max(1.0, work[0, -1] / count)
    squares = np.where(allowed & (cost[None, :] <= bottleneck), (work / mean) ** 2, np.inf)
    _, chosen = _best(squares, count, np.add)
    return [places[i] for i in chosen]


def _least_largest(work: Floats, count: int) -> float:
    return _best(work, count, np.maximum)[0]


def _segments(flops: Ints, places: Sequence[int]) -> Floats:
    """Work of the layer that begins at place i (0: the start) and ends with place j; or inf."""
    sums = np.concatenate([[0], np.cumsum(flops)]).astype(np.float64)
    bounds = sums[[0, *places, len(flops)]]
    work = bounds[None, 1:] - bounds[:-1, None]
    return np.where(np.tri(len(work), k=-1, dtype=np.bool_), np.inf, work)


def _best(price: Floats, count: int, join: np.ufunc) -> tuple[float, list[int]]:
    """The least joined price of `count` segments in a row, and where they meet.

    `price[i, j]` is the segment from bound i to bound j + 1. Of equals the latest cuts are taken.
    """
    total = len(price)
    # best[j] = price of n segments up to bound j; one more segment each turn.
    best = price[0].copy()  # over the end, with one segment
    chosen: list[npt.NDArray[np.int64]] = []
    for _ in range(count - 1):
        joined = join(np.concatenate([[np.inf], best[:-1]])[:, None], price)
        at = total - 1 - np.argmin(joined[::-1], axis=0)
        chosen.append(at)
        best = joined[at, np.arange(total)]
    cuts: list[int] = []
    end = total - 1
    for at in reversed(chosen):
        end = int(at[end]) - 1
        cuts.append(end)
    return float(best[-1]), cuts[::-1]
