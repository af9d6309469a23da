"""The stage search of Alpa: the least sum of the stages' seconds and m - 1 times the slowest.

Letters: m microbatches; s stages from one to the last, itself counted; i first layer; d devices;
o an option on n(o) devices that bears what is in flight s stages before the end; t(i, j, o) seconds
of layers i..j for one microbatch, with an (m-1)-th of what is done once a step; g(i, j, o) the part
that the slowest stage waits for: F, I and W, less under zero-bubble schedules; c(i, o) what the cut
before layer i takes one way, half of it charged on either side; w the threshold; k(s) microbatches
in flight on the first device of s.

    F(s, i, d; w) = min over j, o of  g(i, j, o) + c(i, o) + c(j+1, o) + F(s-1, j+1, d-n(o); w)
                    where t(i, j, o) <= w and the wires of both cuts are busy no longer than w
    F(0, L, 0; w) = 0
    seconds(s)    = min over w of  F + (m-1) max(w, F / k(s))  with  F = F(s, 0, D; w)

and with m for m - 1 under zero-bubble schedules, where F has not all of the slowest stage. Without
pipeline this is the m microbatches and what is done once, exactly.

(Zheng et al., "Alpa", OSDI 2022, section 5.2.) The part with k is ours: with k microbatches on a
round trip of F seconds one ends every F/k at best (Little's law), which is where slow links cost
1f1b more than their latency; without transfers F/k <= w, and if m <= k nobody waits.

F falls as w rises, so between two thresholds that have been filled no F is less than at the upper,
and no w less than the first above the lower: the thresholds are bisected, and halves that this
bound rules out are left. No partition whose slowest stage takes w ends, under any schedule, before
(m-1) w: from there on nothing is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class Field:
    """Input of one dynamic program: the options that mix, their devices, and what each stage bears.

    Column o stands for `options[o]` of the costs, on `devices[o]` devices. `price[o, i, j]` are
    the seconds of layers i..j, infinite where it cannot be or another column serves better;
    `waits[o, i, j]` the part that others wait for; `bears[o, i, j]` the most microbatches in
    flight. A stage with s stages from it to the last has `flights[s]`. `cut` is as in
    `IntervalCosts`, by column. `thresholds` are all seconds that can be slowest, rising.
    """

    options: Ints
    price: Floats
    waits: Floats
    bears: Ints
    flights: Ints
    cut: Floats
    devices: Ints
    device_count: int
    thresholds: Floats

    @property
    def most_stages(self) -> int:
        """The most stages that are considered."""
        return len(self.flights) - 1


def time_field(
    costs: IntervalCosts,
    family: Mapping[int, int],
    flights: Sequence[int],
    memory_bytes: int,
    bubble: Bubble = Bubble.WHOLE,
) -> Field:
    """The field of stages that fit `memory_bytes`.

    `family` has the devices of each submesh, by its number; `flights[s - 1]` is the number of
    microbatches in flight s stages from the end.
    """
    bears = np.clip(costs.most_in_flight(memory_bytes), -1, costs.microbatches)
    waits = bubble.seconds(costs.whole, costs.forward, costs.weight)
    # An option that another beats at everything, or that bears too few in flight, is left out.
    useless = _outdone(costs, waits, bears) | (bears < min(flights))
    price = np.where(useless, np.inf, costs.seconds)
    alive = np.isin(costs.submesh, list(family)) & np.isfinite(price).any(axis=(1, 2))
    options = np.flatnonzero(alive)
    cut = costs.cut[:, costs.submesh[options]]
    return Field(
        options,
        price[options],
        waits[options],
        bears[options],
        np.array([0, *flights], dtype=np.int64),
        cut,
        np.array([family[u] for u in costs.submesh[options].tolist()], dtype=np.int64),
        costs.device_count,
        _thresholds(price[options], cut[1]),
    )


def _thresholds(*prices: Floats) -> Floats:
    """The finite prices, rising; near-equal ones by their largest."""
    values = np.unique(np.concatenate([array[np.isfinite(array)] for array in prices]))
    apart = np.flatnonzero(np.diff(values) > _SAME * values[1:])
    lasts: Floats = values[np.append(apart, len(values) - 1)] if len(values) else values
    return lasts


def _outdone(costs: IntervalCosts, waits: Floats, bears: Ints) -> npt.NDArray[np.bool_]:
    """True where another option of the submesh is as good in every way, and better or before."""
    outdone = np.zeros(waits.shape, dtype=np.bool_)
    for u in np.unique(costs.submesh).tolist():
        mine = np.flatnonzero(costs.submesh == u).tolist()
        for o, other in itertools.permutations(mine, 2):
            # Dominance: no slower, no longer waited for, no less in flight; of equals the first
            # stays.
            as_good = (
                (costs.seconds[other] <= costs.seconds[o])
                & (waits[other] <= waits[o])
                & (bears[other] >= bears[o])
            )
            if other > o:
                as_good &= (
                    (costs.seconds[other] < costs.seconds[o])
                    | (waits[other] < waits[o])
                    | (bears[other] > bears[o])
                )
            outdone[o] |= as_good
    return outdone


def fill(field: Field, threshold: float, most_stages: int) -> Floats:
    """F over [s, i, d] of up to `most_stages`, each of at most `threshold` seconds.

    The compiler is imported where the first field is filled, for it takes a second to start.
    """
    from autopar.passes.stage.kernel import fill_sums

    count = field.price.shape[2]
    sums = np.empty((most_stages + 1, count + 1, field.device_count + 1))
    stages = field.price, field.waits, field.bears
    fill_sums(sums, stages, field.cut, field.devices, field.flights, threshold)
    return sums


@dataclass
class Frontier:
    """For each number of stages the least seconds so far, and the threshold that gave them.

    `cutoff` is the best seconds of any number of stages and microbatches.
    """

    seconds: Floats
    threshold: Floats
    cutoff: float


@dataclass(frozen=True)
class Pace:
    """The rest of the formula after F: m, k(s) for s = 1.. stages in all, and the part g of t."""

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


def find_frontier(field: Field, pace: Pace, cutoff: float, only: int | None = None) -> Frontier:
    """The least seconds for every number of stages, or for `only` one.

    Partitions that take `cutoff` under every schedule are left out.
    """
    thresholds = field.thresholds
    found = Frontier(
        np.full(field.most_stages + 1, np.inf), np.zeros(field.most_stages + 1), cutoff
    )
    if not len(thresholds):
        return found
    wanted = slice(only, only + 1) if only else slice(1, None)

    # Step 1: F at one threshold, and the best seconds of each number of stages with it.
    def fill_at(k: int) -> Floats:
        sums = fill(field, thresholds[k], field.most_stages)[:, 0, field.device_count]
        seconds = pace.seconds(sums, thresholds[k])
        better = np.flatnonzero(seconds[wanted] < found.seconds[wanted]) + (wanted.start or 0)
        found.seconds[better] = seconds[better]
        found.threshold[better] = thresholds[k]
        found.cutoff = min(found.cutoff, float(found.seconds[wanted].min()))
        return sums

    # Step 2: the bound. F falls as w rises, so F at the upper end bounds all of the half below it.
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


def trace_back(field: Field, stages: int, threshold: float) -> tuple[Interval, ...]:
    """Trace the stages of least F back; of equals, small submeshes and few layers."""
    sums = fill(field, threshold, stages)
    parts: list[Interval] = []
    i, d = 0, field.device_count
    for s in range(stages, 0, -1):
        # The first stage of the rest: any option, from layer i to any end, within the threshold.
        wires = np.maximum(field.cut[1, :, i, None], field.cut[1, :, i + 1 :])
        legal = np.maximum(field.price[:, i, i:], wires) <= threshold
        legal &= field.bears[:, i, i:] >= field.flights[s]
        rest = np.full(legal.shape, np.inf)
        for o, devices in enumerate(field.devices.tolist()):
            if devices <= d:
                rest[o] = sums[s - 1, i + 1 :, d - devices]
        cuts = field.cut[0, :, i, None] + field.cut[0, :, i + 1 :]
        # argmin takes the first of equals: the first option, then the fewest layers.
        totals = np.where(legal, field.waits[:, i, i:] + cuts + rest, np.inf)
        o, width = divmod(int(np.argmin(totals)), totals.shape[1])
        parts.append(Interval(i, i + width, int(field.options[o])))
        i, d = i + width + 1, d - int(field.devices[o])
    return tuple(parts)


def min_memory(
    costs: IntervalCosts,
    family: Mapping[int, int],
    flights: Sequence[int],
    below: int,
    only: int | None,
) -> tuple[int, tuple[Interval, ...]] | None:
    """Bisect the least memory of a device that stages fit; None if it is not less than `below`.

    Gives back the bytes and the stages: of any number the fewest, or exactly `only`.
    """
    wanted = slice(only, only + 1) if only else slice(1, None)

    def fitting(nbytes: int) -> tuple[Interval, ...]:
        field = time_field(costs, family, flights, nbytes)
        if not len(field.thresholds):
            return ()
        slowest = float(field.thresholds[-1])
        sums = fill(field, slowest, field.most_stages)[wanted, 0, field.device_count]
        counts = np.flatnonzero(np.isfinite(sums)) + (wanted.start or 0)
        return trace_back(field, int(counts[0]), slowest) if len(counts) else ()

    # Stages that fit some bytes fit more, so the least is bisected.
    low, high = 0, below - 1
    parts = fitting(high)
    if not parts:
        return None
    while low < high:
        middle = (low + high) // 2
        found = fitting(middle)
        low, high, parts = (low, middle, found) if found else (middle + 1, high, parts)
    return high, parts
