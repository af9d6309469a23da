"""Pieces of primitives whose parameters carry shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend.traced import Equation
from autopar.runtime.local.base import Local, LocalRun
from autopar.runtime.local.rebind import rebind


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


RUNS: dict[str, LocalRun] = {
    **dict.fromkeys(["broadcast_in_dim", "empty"], run_shaped),
    **dict.fromkeys(
        ["device_put", "layout_constraint", "reshard", "sharding_constraint"], run_identity
    ),
    **dict.fromkeys(["iota_2x32_shape", "random_bits", "rng_bit_generator"], run_slice_of_whole),
    "iota": _iota,
    "reshape": _reshape,
    "slice": _slice,
    "tile": _tile,
}
