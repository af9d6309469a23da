"""Runs each primitive on a device's pieces, given how operands and results lie on the mesh.

Most primitives run on pieces as they are. Those here have parameters that speak of whole shapes, or
read and write at positions that are counted in the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.frontend.trace.graph import dims_apart, on_pieces
from autopar.frontend.traced import Equation
from autopar.ir.sharding import MeshShape, Sharding
from autopar.runtime.moves import block_index


@dataclass(frozen=True)
class Local:
    """The layout of one op on the mesh: shardings and whole (global) shapes of what it touches.

    Results are partial over the axes given to the op's REDUCE factors. `platform` is that of the
    devices.
    """

    mesh: MeshShape
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    platform: str

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of this device's piece of a result."""
        return self.results[index].shard_shape(self.result_shapes[index], self.mesh)

    def operand_shape(self, index: int) -> tuple[int, ...]:
        """The shape of this device's piece of an operand."""
        return self.operands[index].shard_shape(self.operand_shapes[index], self.mesh)

    def shard_index(self, axes: Sequence[str]) -> jax.Array:
        """This device's block number along a dim sharded over these axes, major to minor."""
        return block_index(axes, self.mesh)


LocalRun = Callable[[Equation, Sequence[Any], Local], Sequence[Any]]


# Shardings in parameters speak of the user's mesh; inside the program there is none.
_SHARDINGS = ("out_sharding", "sharding")


def rebind(equation: Equation, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The primitive's results on these operands, as a list."""
    params = {**equation.params, **changed}
    params.update(dict.fromkeys((name for name in _SHARDINGS if name in params), None))
    out = equation.primitive.bind(*operands, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def run_as_is(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The piece is computed by the same primitive with the same parameters."""
    del local
    return rebind(equation, operands)


# -- primitives whose parameters carry shapes --------------------------------------------------


def run_identity(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Hints about placement: what they ask for was read when the step was planned."""
    del equation, local
    return list(operands)


def run_shaped(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The `shape` parameter becomes that of the piece."""
    return rebind(equation, operands, shape=local.result_shape())


def _reshape(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    return rebind(equation, operands, new_sizes=local.result_shape())


def _tile(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    reps = tuple(
        new // old if old else count
        for new, old, count in zip(
            local.result_shape(), operands[0].shape, equation.params["reps"], strict=True
        )
    )
    return rebind(equation, operands, reps=reps)


def _slice(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Only dims that are kept whole are sharded: their limit is that of the piece."""
    limits = tuple(
        n if axes else limit
        for n, axes, limit in zip(
            operands[0].shape,
            local.operands[0].dims,
            equation.params["limit_indices"],
            strict=True,
        )
    )
    return rebind(equation, operands, limit_indices=limits)


def _iota(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Counted in whole numbers from where the piece starts, then converted: no rounding twice."""
    dim, dtype = equation.params["dimension"], equation.params["dtype"]
    axes = local.results[0].dims[dim]
    if not axes:
        return run_shaped(equation, operands, local)
    shape = local.result_shape()
    counted = lax.broadcasted_iota(jnp.int32, shape, dim) + local.shard_index(axes) * shape[dim]
    return [lax.convert_element_type(counted, dtype)]


def run_slice_of_whole(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Computed whole, then sliced: XLA fuses the slice into the generator, so little is wasted."""
    return [piece_of(whole, local, index) for index, whole in enumerate(rebind(equation, operands))]


def piece_of(whole: Any, local: Local, index: int) -> Any:
    """This device's piece of a result that was computed whole."""
    shape = local.result_shape(index)
    for dim, axes in enumerate(local.results[index].dims):
        if axes:
            start = local.shard_index(axes) * shape[dim]
            whole = lax.dynamic_slice_in_dim(whole, start, shape[dim], dim)
    return whole


# -- reads and writes at computed positions ----------------------------------------------------


_INDEX_BYTES = 4


def _dynamic_slice(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Only dims taken whole are sharded: of those the piece is taken whole."""
    return rebind(equation, operands, slice_sizes=local.result_shape())


def _dynamic_update_slice(
    equation: Equation, operands: Sequence[Any], local: Local
) -> Sequence[Any]:
    """Write, of an update to a part of a sharded dim, the rows that fall on this piece.

    Along such a dim the window read, mixed and written back is as long as the update, or as the
    piece if that is shorter, and lies as near to the update's place as the piece allows.
    """
    operand, update, *starts = operands
    whole, update_shape = local.operand_shapes[0], local.operand_shapes[1]
    mine: Any = True
    sizes = list(update.shape)
    for dim, axes in enumerate(local.operands[0].dims):
        if not axes or whole[dim] == update_shape[dim]:
            continue
        held, written = operand.shape[dim], update_shape[dim]
        first = _clipped(starts[dim], whole[dim] - written)
        first = first - local.shard_index(axes) * held  # where the update starts, in this piece
        sizes[dim] = min(held, written)
        place = jnp.clip(first, 0, held - sizes[dim])
        row = place - first + jnp.arange(sizes[dim], dtype=jnp.int32)
        update = jnp.take(update, jnp.clip(row, 0, written - 1), axis=dim, mode="clip")
        along = [1] * operand.ndim
        along[dim] = sizes[dim]
        mine = mine & ((row >= 0) & (row < written)).reshape(along)
        starts[dim] = place
    if mine is True:
        return rebind(equation, [operand, update, *starts])
    # Starts of the other dims may be of another integer type; all must agree.
    starts = [
        _clipped(s, n - size) for s, n, size in zip(starts, operand.shape, sizes, strict=True)
    ]
    old = lax.dynamic_slice(operand, starts, sizes)
    return rebind(equation, [operand, jnp.where(mine, update, old), *starts])


def _clipped(start: Any, limit: int) -> jax.Array:
    """A start index as int32, moved so that all is in bounds, as XLA does."""
    start = jnp.asarray(start)
    limit = min(limit, _largest(start.dtype))
    return jnp.clip(start, 0, limit).astype(jnp.int32)


def _largest(dtype: Any) -> int:
    return int(np.iinfo(dtype).max)


def _in_piece(
    indices: Any, dims: Sequence[int], local: Local, sharded: Sequence[int]
) -> tuple[Any, Any]:
    """Indices shifted to this piece, and for each index vector whether it falls on the piece.

    Column c of the index vectors speaks of operand dim `dims[c]`.
    """
    held = local.operand_shape(0)
    columns: list[Any] = []
    mine: Any = jnp.ones(indices.shape[:-1], bool)
    for c, dim in enumerate(dims):
        column = indices[..., c]
        if dim in sharded:
            column = column - local.shard_index(local.operands[0].dims[dim]) * held[dim]
            mine &= (column >= 0) & (column < held[dim])
        columns.append(column)
    return jnp.stack(columns, -1), mine


def _bounds(indices: Any, dims: Sequence[int], local: Local, sizes: Sequence[int]) -> Any:
    """The largest index of each column such that the window stays in the whole operand."""
    whole = local.operand_shapes[0]
    most = _largest(indices.dtype)
    return jnp.array([min(whole[d] - sizes[d], most) for d in dims], indices.dtype)


def _gather(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Rows that lie on other shards read as zero; the sum over shards then has each row once."""
    operand, indices = operands
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    whole, held = local.operand_shapes[0], local.operand_shape(0)
    sizes = equation.params["slice_sizes"]
    here = tuple(h if size == n else size for size, n, h in zip(sizes, whole, held, strict=True))
    single = [
        d
        for d in numbers.start_index_map
        if local.operands[0].dims[d] and sizes[d] == 1 and whole[d] > 1
    ]
    if not single:
        return rebind(equation, operands, slice_sizes=here)
    bound = _bounds(indices, numbers.start_index_map, local, sizes)
    valid = jnp.all((indices >= 0) & (indices <= bound), -1)
    indices = jnp.clip(indices, 0, bound).astype(jnp.int32)
    shifted, mine = _in_piece(indices, numbers.start_index_map, local, single)
    clip = lax.GatherScatterMode.CLIP
    flags = {"indices_are_sorted": False, "unique_indices": False}
    (rows,) = rebind(equation, [operand, shifted], slice_sizes=here, mode=clip, **flags)

    def spread(mask: Any) -> Any:
        batch = [d for d in range(rows.ndim) if d not in numbers.offset_dims]
        return lax.broadcast_in_dim(mask, rows.shape, batch)

    zero = jnp.zeros((), rows.dtype)
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return [jnp.where(spread(mine), rows, zero)]
    rows = jnp.where(spread(mine & valid), rows, zero)
    axes = [a for d in single for a in local.operands[0].dims[d]]
    fill = _fill_value(equation, rows.dtype)
    once = jnp.where(local.shard_index(axes) == 0, fill, zero)
    return [jnp.where(spread(valid), rows, once)]


def _fill_value(equation: Equation, dtype: Any) -> Any:
    """The value of rows out of bounds, as `jax.lax.gather` defines it."""
    fill = equation.params["fill_value"]
    if fill is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            fill = jnp.nan
        elif dtype == jnp.bool_:
            fill = True
        else:
            info = np.iinfo(dtype)
            fill = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return jnp.asarray(fill, dtype)


def _scatter(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """Updates of rows that lie on other shards are dropped.

    Where the index batch is sharded and updates add up, so would the operand: only the first
    shard counts it.
    """
    operand, indices, updates = operands
    if indices.dtype.itemsize < _INDEX_BYTES:
        # XLA compares bounds in the index type, so a single update of a longer dim gets lost.
        indices = indices.astype(jnp.int32)
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    batch = [
        a
        for d, axes in enumerate(local.operands[1].dims[:-1])
        if d not in numbers.scatter_indices_batching_dims
        for a in axes
    ]
    if batch and equation.primitive.name in ("scatter-add", "scatter-sub"):
        operand = jnp.where(local.shard_index(batch) == 0, operand, jnp.zeros_like(operand))
    sizes = _window_sizes(numbers, local.operand_shapes[2], len(local.operand_shapes[0]))
    dims = numbers.scatter_dims_to_operand_dims
    by_row = [
        d
        for d in dims
        if local.operands[0].dims[d] and sizes[d] == 1 and local.operand_shapes[0][d] > 1
    ]
    if not by_row:
        return rebind(equation, [operand, indices, updates])
    if mode == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, _bounds(indices, dims, local, sizes))
    # Unsigned and narrow types would wrap around when shifted.
    shifted, mine = _in_piece(_signed(indices, local), dims, local, by_row)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    changed = {"mode": drop, "indices_are_sorted": False}
    if mine.size != 1:
        return rebind(equation, [operand, shifted, updates], **changed)
    # XLA makes a slice, a select and an update of a single write; where the operand is a slice
    # itself it joins the two slices and forgets that the inner start was out of bounds.
    held = local.operand_shape(0)
    inside = [
        jnp.clip(shifted[..., c], 0, held[d] - 1) if d in by_row else shifted[..., c]
        for c, d in enumerate(dims)
    ]
    (written,) = rebind(equation, [operand, jnp.stack(inside, -1), updates], **changed)
    return [jnp.where(mine.reshape(()), written, operand)]


def _signed(indices: Any, local: Local) -> Any:
    """Indices as int32, those beyond every dim set to -1."""
    too_big = indices > min(max(local.operand_shapes[0]), _largest(indices.dtype))
    negative = indices < 0
    return jnp.where(too_big | negative, -1, indices.astype(jnp.int32))


def _window_sizes(numbers: Any, updates: Sequence[int], rank: int) -> list[int]:
    """The window's extent along each dim of the operand."""
    sizes = iter(updates[d] for d in numbers.update_window_dims)
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if d in single else next(sizes) for d in range(rank)]


# -- windows -----------------------------------------------------------------------------------


def _conv(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """A convolution of fewer groups, the major part of the sharded feature or batch dim."""
    batch_dim, feature_dim = equation.params["dimension_numbers"].lhs_spec[:2]
    counts: dict[str, int] = {}
    for name, dim in (("feature_group_count", feature_dim), ("batch_group_count", batch_dim)):
        groups = equation.params[name]
        shards = local.mesh.size(local.operands[0].dims[dim])
        counts[name] = groups // shards if groups > 1 else 1
    return rebind(equation, operands, **counts)


# -- Fourier transforms ------------------------------------------------------------------------


def _fft(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The transform, on XLA:CPU of arrays that lie row by row.

    An all-gather along another dim than the first asks XLA for a layout with that dim outermost.
    Its neighbours take that layout over, and the transform of XLA:CPU then fails as it runs: it
    knows rows alone and does not say so in time.
    """
    if local.platform != "cpu":
        return run_as_is(equation, operands, local)
    (made,) = run_as_is(equation, [_by_rows(operands[0])], local)
    return [_by_rows(made)]


def _by_rows(value: Any) -> Any:
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


# -- hand-written kernels ----------------------------------------------------------------------


def _pallas_call(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The kernel over fewer blocks."""
    laid = (*local.operands, *local.results)
    shards = {
        (tensor, dim, block): local.mesh.size(laid[tensor].dims[dim])
        for places in dims_apart(equation).values()
        for tensor, dim, block in places
    }
    return rebind(equation, operands, **(on_pieces(equation, shards) if shards else {}))


# -- the table ---------------------------------------------------------------------------------


_RUNS: Mapping[str, LocalRun] = {
    **dict.fromkeys(["broadcast_in_dim", "empty"], run_shaped),
    **dict.fromkeys(
        ["device_put", "layout_constraint", "reshard", "sharding_constraint"], run_identity
    ),
    **dict.fromkeys(["iota_2x32_shape", "random_bits", "rng_bit_generator"], run_slice_of_whole),
    "iota": _iota,
    "reshape": _reshape,
    "slice": _slice,
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"],
        _scatter,
    ),
    "conv_general_dilated": _conv,
    "fft": _fft,
    "pallas_call": _pallas_call,
}


def local_run(primitive_name: str) -> LocalRun:
    """The primitive on pieces; it is run as it is unless its parameters speak of whole shapes."""
    return _RUNS.get(primitive_name, run_as_is)


def local_primitives() -> frozenset[str]:
    """The primitives that are not run as they are: those whose rows in `autopar.rules` say so."""
    return frozenset(_RUNS)
