"""The recurrence of the stage search: layers in order are cut into stages that share the devices.

    L, D      layers, devices
    s         stages from one to the last, itself counted
    i..j      its first and last layer
    o         an option: a submesh of n(o) devices, a logical mesh on it, what is recomputed there
    g(i,j,o)  the term of a stage that is added up
    t(i,j,o)  the term whose largest is limited by the threshold w
    b(i,j,o)  microbatches in flight that its memory bears; k(s) are in flight there

    F(s, i, d; w) = min over j, o of  g(i,j,o) + F(s-1, j+1, d-n(o); w)
                    where t(i,j,o) <= w and b(i,j,o) >= k(s)
    F(0, L, 0; w) = 0

      layers    0 ...  i ........ j  j+1 ........... L-1
                      |   stage    |  s-1 more stages   |
      devices         |    n(o)    |      d - n(o)      |

The least w at which F is finite is PipeDream's A(L,D), the least slowest stage (see `pipedream`);
F at a given w is Alpa's (Zheng et al., OSDI 2022, section 5.2). Three questions are asked of it:

    least seconds  `find_frontier`  g seconds and cuts, t seconds or busy wires; w is bisected
    least memory   `min_memory`     the same at the largest w; the memory behind b is bisected
    even chunks    `even_chunks`    g = t squared, t seconds, n = 0; the least w with F finite

F turns into the seconds of a step of m microbatches by a formula:

    seconds(s) = min over w of  F + (m-1) max(w, F / k)    with F = F(s, 0, D; w)

Here g is what a stage makes the others wait for once (F, I and W; less under zero-bubble schedules,
which then have m for m - 1) with half of each cut's transfers on either side, and t has an (m-1)-th
of what is done once a step. The part with k, the microbatches in flight on the first device, is
ours: on a round trip of F seconds one ends every F/k at best (Little's law), which is where slow
links cost 1f1b more than their latency. Without transfers F/k <= w, and if m <= k nobody waits.
Without a pipeline the formula is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.passes.compiled import compiled
from autopar.passes.stage.interval_costs import Floats, IntervalCosts, Ints
from autopar.schedule.table import Bubble

# Thresholds so near to each other are one; a number of stages that is not the best is searched
# no nearer than the second.
_SAME = 1e-9
_NEAR = 3e-3


@dataclass(frozen=True)
class Interval:
    """Layers first..last under an option of `IntervalCosts`."""

    first: int
    last: int
    option: int


# -- the recurrence ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recurrence:
    """The terms of F, over columns [o, i, j], and k(s).

    Column o stands for `options[o]` of the costs, on `devices[o]` devices: none where devices are
    not counted. `added` is g, `slowest` t (infinite where there is no such stage) and `bears` b.
    `thresholds` are all w that are worth trying, rising.
    """

    options: Ints
    added: Floats
    slowest: Floats
    bears: Ints
    flights: Ints  # [s]
    devices: Ints
    device_count: int
    thresholds: Floats

    @property
    def most_stages(self) -> int:
        """The most stages that are considered."""
        return len(self.flights) - 1

    def fill(self, threshold: float, stages: int) -> Floats:
        """F over [s, i, d] of up to so many stages, each of at most `threshold`."""
        layer_count = self.added.shape[2]
        sums = np.empty((stages + 1, layer_count + 1, self.device_count + 1))
        _fill(sums, self.added, self.slowest, self.bears, self.flights, self.devices, threshold)
        return sums

    def of_all(self, threshold: float, stages: int) -> Floats:
        """F over s for all layers on all devices."""
        found: Floats = self.fill(threshold, stages)[:, 0, self.device_count]
        return found

    def trace_back(self, stages: int, threshold: float) -> tuple[Interval, ...]:
        """The stages that F is the sum of; of equals, the first options and the fewest layers."""
        sums = self.fill(threshold, stages)
        parts: list[Interval] = []
        i, d = 0, self.device_count
        for s in range(stages, 0, -1):
            # The first stage of the rest: any option, from layer i to any end.
            legal = self.slowest[:, i, i:] <= threshold
            legal &= self.bears[:, i, i:] >= self.flights[s]
            rest = np.full(legal.shape, np.inf)
            for o, devices in enumerate(self.devices.tolist()):
                if devices <= d:
                    rest[o] = sums[s - 1, i + 1 :, d - devices]
            # argmin takes the first of equals.
            totals = np.where(legal, self.added[:, i, i:] + rest, np.inf)
            o, width = divmod(int(np.argmin(totals)), totals.shape[1])
            parts.append(Interval(i, i + width, int(self.options[o])))
            i, d = i + width + 1, d - int(self.devices[o])
        return tuple(parts)


@compiled
def _fill(
    sums: Floats, added: Floats, slowest: Floats, bears: Ints, flights: Ints, devices: Ints,
    threshold: float,
) -> None:  # fmt: skip
    """Fill sums[s, i, d] with F, from the last stage and the last layer back."""
    most, layers, every = sums.shape[0] - 1, sums.shape[1] - 1, sums.shape[2] - 1
    fewest = devices.min() if len(devices) else 1
    counts = np.unique(devices)
    place = np.searchsorted(counts, devices)
    least = np.empty((len(counts), layers))
    sums[:] = np.inf
    sums[0, layers, 0] = 0.0
    for s in range(1, most + 1):
        for i in range(layers - s, -1, -1):
            # The last stage takes all that is left; others leave a layer for each behind.
            first = layers if s == 1 else i + 1
            # The least g of each number of devices: what is left does not depend on the option.
            least[:] = np.inf
            for o in range(len(devices)):
                k = place[o]
                for after in range(first, layers - s + 2):
                    j = after - 1
                    if slowest[o, i, j] <= threshold and bears[o, i, j] >= flights[s]:
                        least[k, j] = min(least[k, j], added[o, i, j])
            for k in range(len(counts)):
                for after in range(first, layers - s + 2):
                    g = least[k, after - 1]
                    if g == np.inf:
                        continue
                    for d in range(counts[k] + fewest * (s - 1), every + 1):
                        total = g + sums[s - 1, after, d - counts[k]]
                        sums[s, i, d] = min(sums[s, i, d], total)


@compiled
def _is_cut(slowest: Floats, bears: Ints, flights: Ints, threshold: float) -> bool:
    """True if F is finite for as many stages as there are `flights`, no devices counted.

    ends[i] says if layers i.. can be cut into the stages so far.
    """
    layers = slowest.shape[1]
    # borne[i, j]: microbatches in flight that layers i..j bear under the option that bears most.
    borne = np.full((layers, layers), -1, dtype=np.int64)
    for o in range(slowest.shape[0]):
        for i in range(layers):
            for j in range(i, layers):
                if slowest[o, i, j] <= threshold:
                    borne[i, j] = max(borne[i, j], bears[o, i, j])
    ends = np.zeros(layers + 1, dtype=np.bool_)
    ends[layers] = True
    for s in range(1, len(flights)):
        now = np.zeros(layers + 1, dtype=np.bool_)
        for i in range(layers):
            for j in range(i, layers):
                if borne[i, j] >= flights[s] and ends[j + 1]:
                    now[i] = True
                    break
        ends = now
    return bool(ends[0])


def _thresholds(*seconds: Floats) -> Floats:
    """The finite seconds, rising; near-equal ones by their largest."""
    values = np.unique(np.concatenate([array[np.isfinite(array)] for array in seconds]))
    apart = np.flatnonzero(np.diff(values) > _SAME * values[1:])
    lasts: Floats = values[np.append(apart, len(values) - 1)] if len(values) else values
    return lasts


# -- least seconds -------------------------------------------------------------------------------


def stages_that_fit(
    costs: IntervalCosts,
    family: Mapping[int, int],
    flights: Sequence[int],
    memory_bytes: int,
    bubble: Bubble = Bubble.WHOLE,
) -> Recurrence:
    """The recurrence over stages that fit `memory_bytes`.

    `family` has the devices of each submesh, by its number; `flights[s - 1]` is k(s).
    """
    bears = np.clip(costs.most_in_flight(memory_bytes), -1, costs.microbatches)
    waits = bubble.seconds(costs.whole, costs.forward, costs.weight)
    # An option that another beats at everything, or that bears too few in flight, is left out.
    outdone = np.zeros(waits.shape, dtype=np.bool_)
    _mark_outdone(outdone, costs.submesh, costs.seconds, waits, bears)
    useless = outdone | (bears < min(flights))
    seconds = np.where(useless, np.inf, costs.seconds)
    alive = np.isin(costs.submesh, list(family)) & np.isfinite(seconds).any(axis=(1, 2))
    options = np.flatnonzero(alive)
    # cut[:, o, i] before layer i: one way's seconds, and those for which wires are busy.
    cut = costs.cut[:, costs.submesh[options]]
    before, after = cut[:, :, :-1, None], cut[:, :, None, 1:]
    return Recurrence(
        options=options,
        added=waits[options] + before[0] + after[0],
        slowest=np.maximum(seconds[options], np.maximum(before[1], after[1])),
        bears=bears[options],
        flights=np.array([0, *flights], dtype=np.int64),
        devices=np.array([family[u] for u in costs.submesh[options].tolist()], dtype=np.int64),
        device_count=costs.device_count,
        thresholds=_thresholds(seconds[options], cut[1]),
    )


@compiled
def _mark_outdone(
    outdone: npt.NDArray[np.bool_], submesh: Ints, seconds: Floats, waits: Floats, bears: Ints
) -> None:
    """Mark where another option of the submesh is as good in every way, and better or before."""
    count, layers = seconds.shape[0], seconds.shape[1]
    for o in range(count):
        for other in range(count):
            if other == o or submesh[other] != submesh[o]:
                continue
            for i in range(layers):
                for j in range(i, layers):
                    # Dominance: no slower, no longer waited for, no less in flight; of equals the
                    # first stays.
                    slower = seconds[other, i, j] > seconds[o, i, j]
                    if slower or waits[other, i, j] > waits[o, i, j]:
                        continue
                    if bears[other, i, j] < bears[o, i, j]:
                        continue
                    outdone[o, i, j] |= (
                        other < o
                        or seconds[other, i, j] < seconds[o, i, j]
                        or waits[other, i, j] < waits[o, i, j]
                        or bears[other, i, j] > bears[o, i, j]
                    )


@dataclass(frozen=True)
class Pace:
    """The rest of the formula after F: m, k for s = 1.. stages in all, and the part g of t."""

    microbatches: int
    windows: tuple[int, ...]
    bubble: Bubble = Bubble.WHOLE

    def seconds(self, sums: Floats, threshold: float) -> Floats:
        """The formula for F over s = 0.. stages."""
        # Little's law binds where fewer microbatches are in flight than there are.
        windows = np.array([self.microbatches, *self.windows])
        binding = np.isfinite(sums) & (windows < self.microbatches)
        trips = np.where(binding, sums, 0.0) / windows
        turns = self.microbatches - (1 if self.bubble is Bubble.WHOLE else 0)
        seconds: Floats = sums + turns * np.maximum(threshold, trips)
        return seconds


@dataclass
class Frontier:
    """For each number of stages the least seconds so far, and the threshold that gave them.

    `cutoff` is the best seconds of any number of stages and microbatches.
    """

    seconds: Floats
    threshold: Floats
    cutoff: float


def find_frontier(
    recurrence: Recurrence, pace: Pace, cutoff: float = math.inf, only: int | None = None
) -> Frontier:
    """The least seconds for every number of stages, or for `only` one.

    F falls as w rises. So between two thresholds that have been filled no F is less than at the
    upper, and no w less than the first above the lower: thresholds are bisected, and halves that
    this bound rules out are left. Partitions that take `cutoff` under every schedule are left out.
    """
    thresholds, most = recurrence.thresholds, recurrence.most_stages
    found = Frontier(np.full(most + 1, np.inf), np.zeros(most + 1), cutoff)
    if not len(thresholds):
        return found
    wanted = slice(only, only + 1) if only else slice(1, None)

    # Step 1: F at one threshold, and the best seconds of each number of stages with it.
    def fill_at(k: int) -> Floats:
        sums = recurrence.of_all(thresholds[k], most)
        seconds = pace.seconds(sums, thresholds[k])
        better = np.flatnonzero(seconds[wanted] < found.seconds[wanted]) + (wanted.start or 0)
        found.seconds[better] = seconds[better]
        found.threshold[better] = thresholds[k]
        found.cutoff = min(found.cutoff, float(found.seconds[wanted].min()))
        return sums

    # Step 2: the bound, by F at the upper end of a half and w at its lower. No partition whose
    # slowest stage takes w ends, under any schedule, before (m-1) w.
    def hopeless(sums: Floats, k: int) -> bool:
        """True if nothing from threshold k up to the one of `sums` is worth filling."""
        if (pace.microbatches - 1) * thresholds[k] >= found.cutoff:
            return True
        bound = pace.seconds(sums, thresholds[k])[wanted]
        best = found.seconds[wanted]
        close = np.where(best > found.cutoff, 1 - _NEAR, 1 - _SAME)
        return bool(np.all(~(bound < best * close)))

    # Step 3: bisection. Each half has the sums at its upper end and the thresholds low .. high - 1.
    last = len(thresholds) - 1
    halves = [(fill_at(last), 0, last)]
    while halves:
        sums, low, high = halves.pop()
        if low >= high or hopeless(sums, low):
            continue
        middle = (low + high) // 2
        below = fill_at(middle)
        halves.append((sums, middle + 1, high))
        halves.append((below, low, middle))
    return found


# -- least memory --------------------------------------------------------------------------------


def min_memory(
    costs: IntervalCosts,
    family: Mapping[int, int],
    flights: Sequence[int],
    below: int,
    only: int | None,
) -> tuple[int, tuple[Interval, ...]] | None:
    """The least memory of a device that stages fit; None if it is not less than `below`.

    Gives back the bytes and the stages: of any number the fewest, or exactly `only`.
    """

    def fitting(nbytes: int) -> tuple[Interval, ...]:
        recurrence = stages_that_fit(costs, family, flights, nbytes)
        if not len(recurrence.thresholds):
            return ()
        slowest = float(recurrence.thresholds[-1])
        sums = recurrence.of_all(slowest, recurrence.most_stages)
        counts = [s for s in range(1, len(sums)) if np.isfinite(sums[s]) and only in (None, s)]
        return recurrence.trace_back(counts[0], slowest) if counts else ()

    if not fitting(below - 1):
        return None
    # Stages that fit some bytes fit more, so the least is bisected.
    least = bisect_left(range(below), True, key=lambda nbytes: bool(fitting(nbytes)))
    return least, fitting(least)


# -- even chunks ---------------------------------------------------------------------------------


def even_chunks(
    costs: IntervalCosts,
    options: Sequence[int],
    flights: Sequence[int],
    memory_bytes: int,
    chunks: int = 1,
) -> tuple[Interval, ...] | None:
    """The most even cut of the layers into one chunk for each of `flights`; None if none fits.

    Chunks that share a device are the schedule's choice, so that no recurrence over layers in order
    sees the load of a device. As a heuristic the slowest chunk is made as fast as it can be, and of
    such cuts one with the least sum of squares is taken. A device's memory is shared by its
    `chunks` in equal parts; chunk c has `flights[c]` microbatches in flight.
    """
    own = costs.only(options)
    recurrence = Recurrence(
        options=np.array(options, dtype=np.int64),
        added=own.seconds**2,
        slowest=own.seconds,
        bears=own.most_in_flight(memory_bytes, chunks),
        flights=np.array([0, *reversed(flights)], dtype=np.int64),
        devices=np.zeros(len(options), dtype=np.int64),
        device_count=0,
        thresholds=_thresholds(own.seconds),
    )
    count, thresholds = len(flights), recurrence.thresholds

    def is_finite(threshold: float) -> bool:
        return _is_cut(recurrence.slowest, recurrence.bears, recurrence.flights, threshold)

    k = bisect_left(thresholds, True, key=is_finite)
    if k == len(thresholds):
        return None
    return recurrence.trace_back(count, float(thresholds[k]))
