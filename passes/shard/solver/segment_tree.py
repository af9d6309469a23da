"""A tree over the memory rows: add bytes to a range of rows, and know the worst row.

A node of the tree holds the greatest of its two children plus what was added to its whole range
(`pending`); `heap[1]` is the greatest of all.
"""

from __future__ import annotations

import numpy as np

from autopar.passes.compiled import internal
from autopar.passes.shard.solver.problem import Ints

_NOTHING = -(2**60)


def grown(values: Ints) -> tuple[Ints, Ints]:
    """The heap over some rows and its pending additions."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    heap = np.full(2 * size, _NOTHING, dtype=np.int64)
    heap[size : size + len(values)] = values
    level = size
    while level > 1:
        heap[level // 2 : level] = heap[level : 2 * level].reshape(-1, 2).max(axis=1)
        level //= 2
    return heap, np.zeros(size, dtype=np.int64)


@internal
def add(heap: Ints, pending: Ints, first: int, last: int, amount: int) -> None:
    """Add to the rows from `first` up to, but without, `last`."""
    size = len(pending)
    left, right = first + size, last + size
    while left < right:
        if left & 1:
            heap[left] += amount
            if left < size:
                pending[left] += amount
            left += 1
        if right & 1:
            right -= 1
            heap[right] += amount
            if right < size:
                pending[right] += amount
        left >>= 1
        right >>= 1
    for leaf in (first + size, last - 1 + size):
        p = leaf >> 1
        while p:
            heap[p] = max(heap[2 * p], heap[2 * p + 1]) + pending[p]
            p >>= 1


@internal
def worst_row(heap: Ints, pending: Ints) -> int:
    """A row where the value is greatest."""
    p = 1
    while p < len(pending):
        p = 2 * p if heap[2 * p] >= heap[2 * p + 1] else 2 * p + 1
    return p - len(pending)
