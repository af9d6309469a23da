"""Moves a device's piece of a value from one sharding to another, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.ir.listing import IN_ROWS, Move, MoveStep
from autopar.ir.sharding import MeshShape


def run_move(piece: Any, move: Move, mesh: MeshShape) -> Any:
    """The piece after all steps of a move.

    A repeat of an equal move is kept apart, so that a weight gathered again in the backward pass
    does not live in between: behind a barrier, and with leading dims of 1 because XLA:CPU drops
    barriers before it merges equal instructions.
    """
    if not move.value.item_count:  # nothing moves, and MLIR refuses collectives on empty dims
        return jnp.zeros(move.after.shard_shape(move.value.shape, mesh), piece.dtype)
    extra = move.repeat if move.collectives else 0
    if extra:
        piece = lax.optimization_barrier(piece).reshape((1,) * extra + piece.shape)
    # The compiler keeps scopes: what it makes of a collective is traced to its value by them.
    with jax.named_scope(f"{move.value.name}/{move.line}".rstrip("/")):
        for step in move.steps:
            piece = _STEPS[step.kind](piece, _shifted(step, extra), move.combiner, mesh)
    return piece.reshape(piece.shape[extra:])


def _shifted(step: MoveStep, extra: int) -> MoveStep:
    dim = step.dim + extra if step.dim >= 0 else -1
    to_dim = step.to_dim + extra if step.to_dim >= 0 else -1
    return replace(step, dim=dim, to_dim=to_dim)


def block_index(axes: Sequence[str], mesh: MeshShape) -> jax.Array:
    """This device's block number along a dim sharded over `axes`, major to minor."""
    index = jnp.zeros((), jnp.int32)
    for axis in axes:
        index = index * mesh.size((axis,)) + lax.axis_index(axis)
    return index


def local_slice(piece: Any, dim: int, axes: Sequence[str], mesh: MeshShape) -> Any:
    """This device's block of a dim that becomes sharded over `axes`."""
    size = piece.shape[dim] // mesh.size(axes)
    return lax.dynamic_slice_in_dim(piece, block_index(axes, mesh) * size, size, dim)


def _slice(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    del combiner
    return local_slice(piece, step.dim, step.axes, mesh)


def _mask(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    del combiner
    first = block_index(step.axes, mesh) == 0
    return jnp.where(first, piece, jnp.zeros_like(piece))


def _in_rows(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    """The piece in the order of its dims: it is flattened, and no compiler looks past a barrier."""
    del step, combiner, mesh
    return lax.optimization_barrier(piece.reshape(-1)).reshape(piece.shape)


def _all_reduce(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    del mesh
    if combiner == "sum":
        return lax.psum(piece, step.axes)
    if combiner == "max":
        return lax.pmax(piece, step.axes)
    if combiner == "min":
        return lax.pmin(piece, step.axes)
    # Logical and/or have no collective of their own: they are min/max of 0 and 1.
    if piece.dtype != jnp.bool_:
        raise TypeError(f"'{combiner}' over a mesh axis needs booleans, not {piece.dtype}")
    counted = piece.astype(jnp.int32)
    both = lax.pmin(counted, step.axes) if combiner == "and" else lax.pmax(counted, step.axes)
    return both.astype(jnp.bool_)


def _all_gather(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    del combiner, mesh
    return lax.all_gather(piece, step.axes, axis=step.dim, tiled=True)


def _reduce_scatter(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    if combiner != "sum":  # JAX scatters sums only; XLA makes one op of the two
        whole = _all_reduce(piece, step, combiner, mesh)
        return local_slice(whole, step.dim, step.axes, mesh)
    return lax.psum_scatter(piece, step.axes, scatter_dimension=step.dim, tiled=True)


def _all_to_all(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    del combiner, mesh
    return lax.all_to_all(piece, step.axes, step.to_dim, step.dim, tiled=True)


def _permute(piece: Any, step: MoveStep, combiner: str, mesh: MeshShape) -> Any:
    del combiner
    names = tuple(n for n in mesh.names if n in {*step.axes, *step.to_axes})
    return lax.ppermute(piece, names, _permutation(step, names, mesh))


def _permutation(step: MoveStep, names: Sequence[str], mesh: MeshShape) -> list[tuple[int, int]]:
    """(source, target) pairs: each device gets the block that its new place wants.

    The block's number along the new axes, read in the sizes of the old ones, is where it was;
    that differs from swapping indices where axes of unequal sizes change their order.
    Where an axis is left for a new one, the device that holds the block with the two axes'
    indices swapped sends it, so that each device sends and receives once.
    """
    gone = [a for a in step.axes if a not in step.to_axes]
    come = [a for a in step.to_axes if a not in step.axes]
    pairs: list[tuple[int, int]] = []
    for target in itertools.product(*(range(mesh.size((n,))) for n in names)):
        at = dict(zip(names, target, strict=True))
        source = dict(at)
        block = _number(at, step.to_axes, mesh)
        for old in reversed(step.axes):
            block, source[old] = divmod(block, mesh.size((old,)))
        for old, new in zip(gone, come, strict=True):
            source[new] = at[old]
        pairs.append((_number(source, names, mesh), _number(at, names, mesh)))
    return pairs


def _number(at: dict[str, int], names: Sequence[str], mesh: MeshShape) -> int:
    number = 0
    for name in names:
        number = number * mesh.size((name,)) + at[name]
    return number


_STEPS = {
    "slice": _slice,
    "mask": _mask,
    IN_ROWS: _in_rows,
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
}
