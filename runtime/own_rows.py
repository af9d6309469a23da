"""Rows of a batch that one process has: the step is given its share, and no other process's.

    whole batch, 8 rows     process 0 reads 0:4, process 1 reads 4:8
    process 0               OwnRows(rows 0-3, [(0, 4)], 8)   to trees and plans an array of 8 rows
    its devices             take what they need of 0-3; nothing is sent

`ParallelStep.rows_of` says which they are: of a step on one mesh mostly a block, of stages the rows
that the microbatches of the process's own submeshes are cut from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import ArgumentError

Ranges = tuple[tuple[int, int], ...]  # from and to, the latter not included


@dataclass(frozen=True, eq=False)
class OwnRows:
    """The rows of a batch array that this process brings, of `count` that all bring together.

    `held` has them on its first axis, in the order of the `ranges`, which are what
    `ParallelStep.rows_of` gives. To trees it is a leaf with the shape of the whole. Raises
    ArgumentError where it has not as many rows as the ranges say.
    """

    held: Any
    ranges: Ranges
    count: int

    def __post_init__(self) -> None:
        said = sum(stop - start for start, stop in self.ranges)
        if len(self.held) != said:
            raise ArgumentError(
                f"process {jax.process_index()} brings {len(self.held)} rows and says that they "
                f"are rows {text_of(self.ranges)}, which are {said}, of {self.count}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.count, *self.held.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype, as JAX has it."""
        return jax.dtypes.canonicalize_dtype(self.held.dtype)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @cached_property
    def _places(self) -> np.ndarray[Any, Any]:
        """For each row of the whole its place among those held, -1 where it is not."""
        places = np.full(self.count, -1)
        start = 0
        for first, stop in self.ranges:
            places[first:stop] = range(start, start + stop - first)
            start += stop - first
        return places

    def taken(self, rows: np.ndarray[Any, Any]) -> Any:
        """Some rows, numbered as in the whole, in an array of any dims; raises ArgumentError."""
        places = self._places[rows]
        if (places < 0).any():
            missing = ranges_of(rows[places < 0].ravel().tolist())
            raise ArgumentError(
                f"process {jax.process_index()} brings rows {text_of(self.ranges)} of "
                f"{self.count}, and its devices need rows {text_of(missing)} too: bring what "
                "step.rows_of(jax.process_index()) says"
            )
        return np.asarray(self.held, self.dtype)[places]

    def spread(self, sharding: NamedSharding) -> jax.Array:
        """The array on its devices, from the rows that each needs."""
        numbers = np.arange(self.count)

        def piece(box: Any) -> Any:
            return self.taken(numbers[box[0]])[:, *box[1:]]

        return jax.make_array_from_callback(self.shape, sharding, piece)

    def stacked(self, numbers: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
        """The microbatches along a first dim of their own; `numbers` are the rows of each."""

        def piece(box: Any) -> Any:
            return self.taken(numbers[box[0], box[1]])[:, :, *box[2:]]

        return jax.make_array_from_callback((*numbers.shape, *self.shape[1:]), sharding, piece)


def text_of(ranges: Ranges) -> str:
    """Ranges as slices are written."""
    return ", ".join(f"{start}:{stop}" for start, stop in ranges) or "none"


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Numbers as ranges, in order."""
    found: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if found and found[-1][1] == n:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return tuple(found)
