"""How the axes of a mesh divide up the physical axes of a cluster.

A physical axis is a switch level, a torus direction, the devices of one chip, or the slices; they
are listed fastest first, as JAX numbers devices. A *share* `shares[m][p]` is the part of physical
axis p that mesh axis m takes: the shares of a mesh axis multiply to its size, those of a
physical axis to its length. Within a physical axis the faster mesh axis takes the nearer devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Shares = tuple[tuple[int, ...], ...]


def greedy_shares(sizes: Sequence[int], lengths: Sequence[int]) -> Shares:
    """Shares where the last mesh axis takes what it can of the nearest physical axis, and so on.

    The greatest common divisor at each turn always works out, prime by prime, because both
    lists have the same product.
    """
    left = list(lengths)
    rows: list[tuple[int, ...]] = []
    for size in reversed(sizes):
        row: list[int] = []
        for p, length in enumerate(left):
            share = math.gcd(size, length)
            size //= share
            left[p] //= share
            row.append(share)
        rows.append(tuple(row))
    return tuple(reversed(rows))


def torus_shares(sizes: Sequence[int], lengths: Sequence[int]) -> Shares:
    """Shares that split the fewest physical axes, then the fewest for the fastest mesh axes.

    Exhaustive over the ways to factor each mesh axis; ties go to the first in a fixed order
    (the fastest mesh axis takes most of the fastest physical axis).
    """
    best: Shares | None = None
    best_score: tuple[int, ...] = ()
    for shares in _every_share(tuple(reversed(sizes)), tuple(lengths)):
        score = _score(shares, lengths)
        if best is None or score < best_score:
            best, best_score = shares, score
    return tuple(reversed(best or ()))


def _every_share(sizes: tuple[int, ...], left: tuple[int, ...]) -> Iterator[Shares]:
    if not sizes:
        yield ()
        return
    for row in _rows(sizes[0], left):
        rest = tuple(length // share for length, share in zip(left, row, strict=True))
        for others in _every_share(sizes[1:], rest):
            yield (row, *others)


def _rows(size: int, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to write `size` as a product of divisors of `left`, biggest first."""
    if not left:
        if size == 1:
            yield ()
        return
    common = math.gcd(size, left[0])
    for share in range(common, 0, -1):
        if common % share == 0:
            for others in _rows(size // share, left[1:]):
                yield (share, *others)


def _score(shares: Shares, lengths: Sequence[int]) -> tuple[int, ...]:
    """Pieces of split axes over all mesh axes, then for each mesh axis, fastest first."""
    pieces = [
        sum(1 for share, length in zip(row, lengths, strict=True) if 1 < share < length)
        for row in shares
    ]
    return (sum(pieces), *pieces)


def device_numbers(shares: Shares, lengths: Sequence[int]) -> tuple[int, ...]:
    """For each mesh position, slowest axis first, the number of the device that sits there."""
    base = [1] * len(lengths)
    for p in range(1, len(lengths)):
        base[p] = base[p - 1] * lengths[p - 1]
    numbers: tuple[int, ...] = (0,)
    # Fastest mesh axis first: each axis repeats what is inside it at growing offsets.
    for row in reversed(shares):
        offsets: tuple[int, ...] = (0,)
        for p, share in enumerate(row):
            offsets = tuple(step * base[p] + o for step in range(share) for o in offsets)
            base[p] *= share
        numbers = tuple(o + n for o in offsets for n in numbers)
    return numbers
