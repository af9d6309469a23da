"""Searches assignments that fit: from a start to where it fits, then by cooling in cycles.

Blocks are set anew under noise (perturb and take the best; Papandreou and Yuille, 2011) that
fades over a cycle, and under the dual's prices, which fade too: first room is left where the dual
says that it is dear, in the end only what fits counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autopar.passes.shard.solver.ascent import sums_before
from autopar.passes.shard.solver.blocks import Block, State, fill_field, search
from autopar.passes.shard.solver.effort import Meter
from autopar.passes.shard.solver.flat import Flat, Ints
from autopar.passes.shard.solver.messages import held_rows, total_cost, widest
from autopar.passes.shard.solver.peaks import grown
from autopar.passes.shard.solver.problem import Floats

_BLOCKS = (60, 200)  # the most nodes of a block, by worker
_HEATS = ((0.2, 0.02), (0.05, 0.5), (0.2, 0.005), (0.002, 0.1))  # by cycle and worker
_ROUND_ENTRIES, _MOST_ROUNDS = 5_500_000, 10  # with so many entries, one round of cycles
_COLDEST = 0.002  # share of a cycle's heat that is left at its end
_MEND_ROUNDS = 200
_DEARER = 1.15
_SECONDS_A_CHUNK = 0.15
_FIRST_ENTRIES, _FEWEST, _MOST = 1_000_000, 100_000, 100_000_000
_GREEDY = 3  # entries of a descent, as a multiple of all entries
_MIX = 0x9E3779B97F4A7C15


class Worker:
    """An assignment that is being improved, with room for a block and a stream of chance."""

    def __init__(self, flat: Flat, seed: int, most: int) -> None:
        count = len(flat.choices) - 1
        self._flat = flat
        self._open = np.flatnonzero(np.diff(flat.choices) > 1)
        self._block = _block(count, max(1, min(most, len(self._open))), widest(flat))
        self._chance = np.array([(seed + 1) * _MIX % 2**64 | 1], dtype=np.uint64)
        self._field = np.zeros(len(flat.costs))
        self._holders = np.repeat(np.arange(count), np.diff(flat.holdings))
        self.choice = np.zeros(count, dtype=np.int64)
        self.take(self.choice)

    def take(self, choice: Ints) -> None:
        """Go on from an assignment."""
        self.choice = choice.copy()
        fill_field(self._flat, self.choice, self._field)
        self._heap, self._pending = grown(self._over())

    def _over(self) -> Ints:
        over: Ints = held_rows(self._flat, self.choice) - self._flat.slack
        return over

    @property
    def fits(self) -> bool:
        """True if the assignment keeps each row's limit."""
        return bool(self._heap[1] <= 0)

    @property
    def cost(self) -> float:
        """Of the assignment."""
        return total_cost(self._flat, self.choice)

    def run(self, entries: int, prices: Floats, heat: float, mending: Ints | None = None) -> int:
        """Set blocks anew, within the rows unless it is around the nodes `mending`.

        Returns how many table entries were looked at.
        """
        roots = self._open if mending is None else mending
        if not roots.size:
            return entries
        state = State(
            self.choice,
            self._field,
            self._heap,
            self._pending,
            sums_before(prices),
            self._chance,
        )
        return search(self._flat, state, self._block, roots, entries, heat, mending is None)

    def mend(self, prices: Floats, scale: float, meter: Meter, until: float) -> bool:
        """Make the rows over their limit dearer until none is; whether that worked."""
        flat, prices = self._flat, prices.copy()
        least = 1e-2 * scale / max(float(flat.slack.max(initial=1)), 1.0)
        for _ in range(_MEND_ROUNDS):
            if self.fits or meter.share > until:
                break
            over = self._over() > 0
            prices[over] = prices[over] * _DEARER + least
            least *= _DEARER
            before = np.concatenate([[0], np.cumsum(over)])
            roots = np.unique(self._holders[before[flat.lasts] > before[flat.firsts]])
            roots = roots[np.isin(roots, self._open)]
            widths = np.diff(flat.choices)[roots]
            entries = int(4 * (widths * widths + 10).sum())
            meter.spend(self.run(min(entries, _MOST), prices, 0.0, roots))
        return self.fits

    def descend(self, prices: Floats, meter: Meter, until: float) -> None:
        """Cheaper while it is easy: under the prices, under half of them, under none."""
        entries = min(_GREEDY * len(self._flat.entries) + 1000, _MOST)
        while meter.share < until:
            before = self.cost
            for fading in (1.0, 0.5, 0.0):
                meter.spend(self.run(entries, fading * prices, 0.0))
            if self.cost >= before * (1 - 1e-4):
                break


def _block(count: int, most: int, wide: int) -> Block:
    def whole(size: int, value: int = 0) -> Ints:
        return np.full(size, value, dtype=np.int64)

    return Block(
        nodes=whole(most),
        parents=whole(most),
        arcs=whole(most),
        place=whole(count, -1),
        touching=whole(count),
        edge=whole(count),
        wide=whole(1, wide),
        own=np.zeros(most * wide),
        total=np.zeros(most * wide),
        follow=whole(most * wide),
        found=whole(most),
        rows=whole(16),
        dearer=np.zeros(16),
    )


def annealed(
    flat: Flat,
    prices: Floats,
    starts: Sequence[Ints],
    bound: float,
    meter: Meter,
    seed: int,
) -> Ints:
    """The cheapest assignment found from starts that fit, the best first, by two workers."""
    workers = [Worker(flat, 2 * seed + i, most) for i, most in enumerate(_BLOCKS)]
    heat = abs(bound) / max(int((np.diff(flat.choices) > 1).sum()), 1)
    best, cost = starts[0], total_cost(flat, starts[0])
    begin = meter.share
    # A small problem soon cools down to what one run of chance finds: it is given more of them.
    rounds = min(max(int((_ROUND_ENTRIES / max(len(flat.entries), 1)) ** 2), 1), _MOST_ROUNDS)
    cycles = _HEATS * rounds
    for cycle, heats in enumerate(cycles):
        first = begin + (1 - begin) * cycle / len(cycles)
        last = begin + (1 - begin) * (cycle + 1) / len(cycles)
        workers[0].take(best)
        workers[1].take(starts[(cycle + 1) % len(starts)] if cycle % 2 == 0 else best)
        _cool(workers, prices, [heat * h for h in heats], meter, (first, last))
        for worker in workers:
            if worker.fits and worker.cost < cost:
                best, cost = worker.choice.copy(), worker.cost
        if cost - bound <= 1e-7 * abs(cost):
            break
    return best


def _cool(
    workers: Sequence[Worker],
    prices: Floats,
    heats: Sequence[float],
    meter: Meter,
    span: tuple[float, float],
) -> None:
    """Runs a cycle: all workers side by side, in chunks, from their heat down to almost nothing."""
    entries = _FIRST_ENTRIES
    with ThreadPoolExecutor(len(workers)) as pool:
        while (share := meter.share) < span[1]:
            done = min(max((share - span[0]) / (span[1] - span[0]), 0.0), 1.0)
            began = meter.seconds
            faded = max(0.0, 1 - 1.25 * done) * prices
            runs = [
                pool.submit(worker.run, entries, faded, heat * _COLDEST**done)
                for worker, heat in zip(workers, heats, strict=True)
            ]
            meter.spend(sum(run.result() for run in runs))
            if meter.effort.work is None:
                scale = _SECONDS_A_CHUNK / max(meter.seconds - began, 1e-3)
                entries = int(min(max(entries * min(max(scale, 0.3), 3.0), _FEWEST), _MOST))
