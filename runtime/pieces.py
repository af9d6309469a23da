"""A leaf of the user's whose rows live on several submeshes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import ArgumentError
from autopar.frontend.traced import Piece
from autopar.runtime.bind import is_key
from autopar.runtime.cells import InCell, as_array
from autopar.runtime.spanning import spread


@dataclass(frozen=True, eq=False)
class StackedPieces:
    """An array that is cut along dim 0, each piece an array on a submesh of its own.

    A stack of layers that stages share comes back from a step so, and the next step takes it so.
    To trees it is a leaf with a shape and a dtype; `np.asarray` makes it whole on the host, and so
    does whatever saves or compares host arrays. Other functions of JAX than
    `jnp.asarray` want what `gather` gives. The `parts` are the pieces, some of them in cells.
    """

    parts: tuple[jax.Array | InCell, ...]

    @cached_property
    def pieces(self) -> tuple[jax.Array, ...]:
        """The pieces, each an array of its own."""
        return tuple(map(as_array, self.parts))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of each piece."""
        return tuple([part.shape[0] for part in self.parts])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (sum(self.rows), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of every piece."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of items of the whole array."""
        return int(np.prod(self.shape))

    def is_deleted(self) -> bool:
        """True if a step, or anything else, has consumed a piece."""
        return any(part.is_deleted() for part in self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("the pieces of an array on several submeshes cannot be viewed as one")
        whole = np.concatenate([np.asarray(p) for p in self.pieces])
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __jax_array__(self) -> jax.Array:
        return self.gather()

    def gather(self, sharding: Any = None) -> jax.Array:
        """The whole array, by way of the host: on JAX's default device, or as `sharding` says."""
        if is_key(self.dtype):
            data = np.concatenate([np.asarray(jax.random.key_data(p)) for p in self.pieces])
            keys = jax.random.wrap_key_data(
                jnp.asarray(data), impl=jax.random.key_impl(self.pieces[0])
            )
            return keys if sharding is None else spread(keys, sharding)
        whole = np.asarray(self)
        return jnp.asarray(whole) if sharding is None else spread(whole, sharding)

    def block_until_ready(self) -> StackedPieces:
        """Itself, once every piece has been computed."""
        for part in self.parts:
            part.block_until_ready()
        return self

    def __repr__(self) -> str:
        places = ", ".join(
            f"{sum(p.shape[0] for p in own)} on {devices}"
            for devices, own in groupby(self.pieces, _devices)
        )
        return f"StackedPieces({self.dtype}[{','.join(map(str, self.shape))}]: {places})"


def pieces_of(leaf: Any) -> tuple[Any, ...]:
    """The arrays that a leaf is made of: those of a stack in pieces, or the leaf itself."""
    return leaf.pieces if isinstance(leaf, StackedPieces) else (leaf,)


def with_first_rows(pieces: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Each piece of a leaf, with the row of the whole at which it begins."""
    first = 0
    for piece in pieces:
        yield piece, first
        first += piece.shape[0] if piece.shape else 0


def box_in_whole(box: Any, shape: Sequence[int], first: int) -> tuple[slice, ...]:
    """A box in a piece as a box in the whole leaf, of which the piece's first row is `first`."""
    ends = [s.indices(n)[:2] for s, n in zip(box, shape, strict=True)]
    shifts = [first, *[0] * len(ends)]
    return tuple(slice(a + by, b + by) for (a, b), by in zip(ends, shifts, strict=False))


def cut(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """A leaf as pieces of so many rows: one that is in such parts already gives them back.

    Raises ArgumentError where its rows are not that many.
    """
    if isinstance(leaf, StackedPieces):
        if leaf.rows == tuple(sizes):
            return leaf.parts
        leaf = leaf.gather()
    if leaf.shape[0] != sum(sizes):
        raise ArgumentError(f"a leaf of {leaf.shape[0]} rows is to be cut into {list(sizes)}")
    return list(_slices(_sliceable(leaf), sizes))


def _sliceable(leaf: Any) -> Any:
    """A leaf on the host, where a slice costs nothing; keys have no such form."""
    if isinstance(leaf, jax.Array) and not is_key(leaf.dtype):
        return np.asarray(leaf)
    return leaf


def _slices(leaf: Any, sizes: Sequence[int]) -> Iterator[Any]:
    start = 0
    for size in sizes:
        yield leaf[start : start + size]
        start += size


def _devices(piece: jax.Array) -> str:
    numbers = sorted(d.id for d in piece.devices())
    platform = next(iter(piece.devices())).platform
    return f"{platform} {', '.join(map(str, numbers))}"


Sizes = tuple[int, ...]  # rows of each piece of a leaf; none where it is whole


def piece_sizes(pieces: Sequence[Piece]) -> tuple[Sizes, ...]:
    """The rows of the pieces of each leaf, from all pieces in order."""
    leaves = [list(own) for _, own in groupby(pieces, lambda piece: piece.leaf)]
    return tuple(
        tuple(piece.stop - piece.start for piece in own if piece.stop is not None) for own in leaves
    )


def cut_leaves(leaves: Sequence[Any], sizes: Sequence[Sizes]) -> list[Any]:
    """The program's inputs from the user's leaves; no sizes at all mean that they are the same."""
    if not sizes:
        return list(leaves)
    cuts = (cut(leaf, own) if own else (leaf,) for leaf, own in zip(leaves, sizes, strict=True))
    return [piece for pieces in cuts for piece in pieces]


def join_outputs(outputs: Sequence[Any], sizes: Sequence[Sizes]) -> list[Any]:
    """The user's results from the program's outputs."""
    if not sizes:
        return list(outputs)
    left = iter(outputs)
    return [StackedPieces(tuple(islice(left, len(own)))) if own else next(left) for own in sizes]
