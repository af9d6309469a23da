"""The heap of a compiled step: XLA gives each buffer a place for as long as it is held.

It places the largest first, or those that are held longest, whichever takes less; each into the
smallest hole that is free all the while, and so leaves holes that hold nothing:

    place    b b b . . c c c      a is held while b and c are, which are not held at once: d, as
             a a a a a a a a      large as both, finds no room beside a before c is gone
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Smaller buffers than so much of what is held find room in the holes between the others, as do all
# but so many: placing them takes the square of their number.
_SMALL_SHARE, _MOST_PLACED = 1 / 4096, 1024


class Buffer(NamedTuple):
    """Bytes that are held from one moment to another, both included."""

    nbytes: int
    first: int
    last: int


def heap_bytes(buffers: Sequence[Buffer]) -> int:
    """The bytes of the heap in which XLA lays such buffers."""
    most, placed = most_at_once(buffers), _by_events(buffers)
    large = [b for b in placed if b.nbytes > most * _SMALL_SHARE]
    by_size = sorted(large, key=lambda b: (-b.nbytes, b.first - b.last, b.first))[:_MOST_PLACED]
    nbytes = _laid_out(by_size)
    if nbytes > most:  # no order takes less than what is held at once
        nbytes = min(nbytes, _laid_out(sorted(by_size, key=lambda b: b.first - b.last)))
    return max(most, nbytes)


def _by_events(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The buffers in XLA's time: each begin and each end of one is a moment of its own."""
    begins = sorted(range(len(buffers)), key=lambda b: buffers[b].first)
    ends = sorted(begins, key=lambda b: buffers[b].last)
    first, last, ended = [0] * len(buffers), [0] * len(buffers), 0
    for begun, b in enumerate(begins):
        while ended < len(ends) and buffers[ends[ended]].last < buffers[b].first:
            last[ends[ended]] = begun + ended
            ended += 1
        first[b] = begun + ended
    for at, b in enumerate(ends[ended:], len(buffers) + ended):
        last[b] = at
    rows = zip(buffers, first, last, strict=True)
    return [Buffer(b.nbytes, begin, end) for b, begin, end in rows]


def most_at_once(buffers: Iterable[Buffer]) -> int:
    """The most bytes that are held at once."""
    changes = [(b.first, 0, b.nbytes) for b in buffers]
    changes += [(b.last, 1, -b.nbytes) for b in buffers]
    now = most = 0
    for _, _, nbytes in sorted(changes):
        now += nbytes
        most = max(most, now)
    return most


def _laid_out(buffers: Iterable[Buffer]) -> int:
    """The end of the last of some buffers that are placed in this order."""
    placed: list[tuple[int, int, int, int]] = []  # start and end in the heap, first and last moment
    end_of_all = 0
    for nbytes, first, last in buffers:
        end = place = smallest = 0
        for start, after, others_first, others_last in placed:
            if others_first > last or others_last < first:
                continue
            hole = start - end
            if hole >= nbytes and (not smallest or hole < smallest):
                smallest, place = hole, end
            end = max(end, after)
        if not smallest:
            place = end
        insort(placed, (place, place + nbytes, first, last))
        end_of_all = max(end_of_all, place + nbytes)
    return end_of_all
