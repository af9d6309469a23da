"""Iotas and random bits of the whole batch, at the rows of one microbatch alone.

Legend: a dim of the whole is outer x B x inner long; a microbatch has b of the B rows; i is its
number; k is the row-major place of an item in the whole array, as the words k = hi * 2^32 + lo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from autopar.ir.batching import Rows

_WORD = 1 << 32
_HALF = 1 << 16
_Wide = tuple[jax.Array, jax.Array]  # hi, lo


@dataclass(frozen=True)
class Window:
    """The rows of one microbatch in an array of `shape` that has all the rows."""

    shape: tuple[int, ...]
    rows: Rows
    part: int  # rows of the microbatch

    @property
    def batch(self) -> int:
        """Rows of the whole."""
        return self.shape[self.rows.dim] // (self.rows.outer * self.rows.inner)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what the window shows."""
        size = self.rows.outer * self.part * self.rows.inner
        dim = self.rows.dim
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])


def window_of(whole: jax.Array, index: jax.Array, window: Window) -> jax.Array:
    """The rows of microbatch `index` of a whole array."""
    dim, rows = window.rows.dim, window.rows
    before, after = window.shape[:dim], window.shape[dim + 1 :]
    split = lax.reshape(whole, (*before, rows.outer, window.batch, rows.inner, *after))
    starts = [jnp.zeros_like(index)] * split.ndim
    starts[dim + 1] = index * window.part
    sizes = (*before, rows.outer, window.part, rows.inner, *after)
    return lax.reshape(lax.dynamic_slice(split, starts, sizes), window.part_shape)


def places(index: jax.Array, window: Window, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The place of each item of the window along the dim of rows: iota, cut to the window."""
    rows = window.rows
    counted = dtype if jnp.issubdtype(dtype, jnp.integer) else "int32"
    block, stride = window.part * rows.inner, window.batch * rows.inner
    here = lax.broadcasted_iota(counted, window.part_shape, rows.dim)
    start = lax.convert_element_type(index, counted) * jnp.asarray(block, counted)
    moved = here + lax.broadcast(start, window.part_shape)
    if rows.outer > 1:
        moved = moved + (here // block) * jnp.asarray(stride - block, counted)
    return moved if counted is dtype else lax.convert_element_type(moved, dtype)


def threefry_bits(key: jax.Array, index: jax.Array, window: Window, bit_width: int) -> jax.Array:
    """The random bits of a threefry key in the window, those that the whole array would have.

    Item k of what JAX draws (`jax_threefry_partitionable`) is the hash of the words of k: so any
    part can be drawn alone. Where there are several keys, their dims come before the window's.
    """
    data = jax.random.key_data(key)
    shape = (*key.shape, *window.part_shape)
    words = [lax.index_in_dim(data, i, key.ndim, keepdims=False) for i in (0, 1)]
    keys = [lax.broadcast_in_dim(w, shape, range(key.ndim)) for w in words]
    own = range(key.ndim, len(shape))
    counts = [lax.broadcast_in_dim(w, shape, own) for w in _counters(index, window)]
    high, low = threefry2x32_p.bind(*keys, *counts)
    if bit_width == 64:
        wide = [lax.convert_element_type(b, jnp.uint64) for b in (high, low)]
        return lax.shift_left(wide[0], jnp.full_like(wide[0], 32)) | wide[1]
    mixed = high ^ low
    return mixed if bit_width == 32 else lax.convert_element_type(mixed, f"uint{bit_width}")


def _counters(index: jax.Array, window: Window) -> _Wide:
    """The words of k for each item of the window."""
    shape, wide = window.part_shape, math.prod(window.shape) > _WORD
    zero = jnp.zeros(shape, jnp.uint32)
    found = (zero, zero)
    for dim, size in enumerate(window.shape):
        if size == 1:
            continue
        along = (
            places(index, window, jnp.uint32)
            if dim == window.rows.dim
            else lax.broadcasted_iota(jnp.uint32, shape, dim)
        )
        stride = math.prod(window.shape[dim + 1 :])
        if wide:
            found = _sum(found, _product(along, stride))
        else:
            term = along * jnp.uint32(stride) if stride > 1 else along
            found = (zero, term if found[1] is zero else found[1] + term)
    return found


def _product(words: jax.Array, factor: int) -> _Wide:
    """Both words of a product of 32 bits and a factor below 2^64, modulo 2^64."""
    over, factor = divmod(factor, _WORD)
    high, low = (jnp.uint32(n) for n in divmod(factor, _HALF))
    top, bottom = words >> 16, words & jnp.uint32(_HALF - 1)
    middle = top * low + ((bottom * low) >> 16)
    carried = bottom * high + (middle & jnp.uint32(_HALF - 1))
    upper = top * high + (middle >> 16) + (carried >> 16) + words * jnp.uint32(over)
    return upper, words * jnp.uint32(factor)


def _sum(left: _Wide, right: _Wide) -> _Wide:
    low = left[1] + right[1]
    carry = lax.convert_element_type(low < left[1], jnp.uint32)
    return left[0] + right[0] + carry, low
