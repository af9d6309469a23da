"""Keeps a computation from being merged with an earlier one that reads the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def fence(values: Sequence[Any], tied: bool, platform: str) -> Sequence[Any]:
    """The values, as ones that the compiler does not know to be the same; bits are kept.

    XLA:CPU drops barriers before it merges equal instructions. There, values that are `tied` to
    the last of them are also chosen by a test that never holds, on what that last one is at run
    time: they differ to the compiler, and are not ready before it is.
    """
    fenced = lax.optimization_barrier(tuple(values))
    last = fenced[-1]
    if not tied or platform != "cpu" or not jnp.issubdtype(last.dtype, jnp.floating):
        return fenced
    first = lax.reshape(last, (last.size,))[0]
    never = (first != first) & (first == first)
    return [_chosen(never, value) for value in fenced]


def _chosen(never: jax.Array, value: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _chosen(never, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jnp.where(never, jnp.zeros_like(value), value)
