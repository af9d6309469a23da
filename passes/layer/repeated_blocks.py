"""Repeated blocks of a forward pass: runs of ops that come again and again.

    ops     e a b c a b c a b c h       signatures; e, h: embedding and head
    shift 3       a b c a b c           keys[:-3] == keys[3:] holds for 6 ops in a row
    repeat        start 1, period 3, count 3

Of all periods the one whose blocks hold most of the FLOPs is taken; then the same on either side.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autopar.passes.layer.forward_pass import Forward, Ints
from autopar.passes.layer.isomorphism import signature

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
