"""Several chunks of layers on each of p equal submeshes: the most even cut, a heuristic.

Which chunks share a device is the schedule's matter, so that no recurrence over layers in order
sees what a device takes in all. The slowest chunk is made as fast as it can be, and of such cuts
one with the least sum of squares is taken; the simulator says what that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.passes.stage.dynamic import Part
from autopar.passes.stage.ranges import Floats, Ints, Ranges


def even_chunks(
    ranges: Ranges, options: Sequence[int], count: int, bears: Sequence[Ints] | None = None
) -> tuple[Part, ...] | None:
    """`count` chunks in order, each under the fastest of `options` that it may have.

    `bears[c]`, an array [o, i, j] for chunk c, is 0 where option o does not fit the chunk; without
    it everything fits. None where no such chunks exist.
    """
    mine = list(options)
    seconds: list[Floats] = []
    for c in range(count):
        legal = bears[c][mine] != 0 if bears else np.True_
        seconds.append(np.where(legal, ranges.seconds[mine], np.inf))
    fastest = [chunk.min(axis=0) for chunk in seconds]
    slowest = _least_maximum(fastest)
    if not np.isfinite(slowest):
        return None
    parts: list[Part] = []
    for c, (first, last) in enumerate(_most_even(fastest, slowest)):
        option = mine[int(seconds[c][:, first, last].argmin())]
        parts.append(Part(first, last, option))
    return tuple(parts)


def _least_maximum(fastest: Sequence[Floats]) -> float:
    """Seconds of the slowest chunk, at best."""
    count = len(fastest[0])
    least = np.full(count + 1, np.inf)
    least[count] = 0.0
    for seconds in reversed(fastest):
        least[:count] = np.maximum(seconds, least[1:]).min(axis=1)
        least[count] = np.inf
    return float(least[0])


def _most_even(fastest: Sequence[Floats], slowest: float) -> list[tuple[int, int]]:
    """First and last layers of chunks that take no more than `slowest`, by least squares."""
    count = len(fastest[0])
    sums = [np.full(count + 1, np.inf)]
    sums[0][count] = 0.0
    squares = [np.where(seconds <= slowest, seconds**2, np.inf) for seconds in fastest]
    for square in reversed(squares):
        sums.append(np.append((square + sums[-1][1:]).min(axis=1), np.inf))
    cuts: list[tuple[int, int]] = []
    first = 0
    for square, rest in zip(squares, reversed(sums[:-1]), strict=True):
        last = int((square[first] + rest[1:]).argmin())
        cuts.append((first, last))
        first = last + 1
    return cuts
