"""Layers of even work, cut where little crosses (Alpa, OSDI 2022, section 5.2).

Repeated blocks are layers by themselves if nothing else is asked for. Else a dynamic program over
the places where a cut is cheap, in two passes over [i, j], the ops between cuts i and j:

    B(n, j) = min over i of max(B(n-1, i), cost(j))     for work(i, j) <= (1 + balance) mean
    S(n, j) = min over i of S(n-1, i) + work(i, j)^2    and cost(j) <= B(count, end)

So the largest cut is as small as it can be, and among such cuts the work is as even as it can be.
Ops stay in the order of the trace, which is topological, so that a cut is a place in it: no graph
is sorted, no dominator and no min cut is looked for, and networkx has nothing to do here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from autopar.ir.batching import Batching
from autopar.ir.stages import LayerSequence
from autopar.ir.values import Role
from autopar.passes.base import Setting
from autopar.passes.layer.base import AbstractLayering
from autopar.passes.layer.forward_pass import Forward, Ints, forward_of
from autopar.passes.layer.repeated_blocks import Repeat, find_repeats
from autopar.passes.layer.sequence import layers_from
from autopar.passes.layer.single import Single

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
        nbytes = max((state[n] for n in op.value_operands() if n in state), default=0)
        if nbytes and not moment.loops and i <= forward.positions[-1]:
            state.update((r.name, nbytes) for r in op.results if r.nbytes >= nbytes // 2)
    # 2. FLOPs and bytes of parameters of the blocks and of the stretches between them.
    inner = [bound for repeat in repeats for bound in repeat.bounds]
    starts = sorted({0, *inner} - {len(forward.positions)})
    weights: list[Ints] = []
    for start, stop in pairwise([*starts, len(forward.positions)]):
        ops = (graph.ops[i] for i in forward.positions[start:stop])
        read = dict.fromkeys(n for op in ops for n in op.value_operands())
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
