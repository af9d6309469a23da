"""Kernels of Pallas, run by its interpreter, over grids that can and cannot be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tests.rules.cases import Example, f


def rows(block: Any, *index: int | None) -> Any:
    """Blocks of a tensor: for each of its dims the dim of the grid that counts them, or None."""
    return pl.BlockSpec(block, lambda *at: tuple(0 if i is None else at[i] for i in index))


def kernel(
    body: Callable[..., None], grid: tuple[int, ...], ins: Any, outs: Any, shape: tuple[int, ...]
) -> Callable[..., Any]:
    """A kernel with one result."""
    out_shape = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(
        body, out_shape=out_shape, grid=grid, in_specs=ins, out_specs=outs, interpret=True
    )


def _scaled(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] * w[...] + 1


def _summed(x: Any, out: Any) -> None:
    """Adds up over the second dim of the grid, of which it asks where it is."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += x[...].sum(axis=1, keepdims=True)


def _numbered(x: Any, out: Any) -> None:
    out[...] = x[...] + pl.program_id(0)


def _copied(x: Any, out: Any) -> None:
    out[...] = x[...]


BY_ROWS = kernel(_scaled, (4,), [rows((2, 4), 0, None), rows((1, 4), None, None)],
                 rows((2, 4), 0, None), (8, 4))  # fmt: skip
BY_TILES = kernel(_scaled, (4, 2), [rows((2, 4), 0, 1), rows((1, 4), None, 1)],
                  rows((2, 4), 0, 1), (8, 8))  # fmt: skip
SUMS = kernel(_summed, (4, 2), [rows((2, 4), 0, 1)], rows((2, 1), 0, None), (8, 1))
NUMBERED = kernel(_numbered, (4,), [rows((2, 4), 0, None)], rows((2, 4), 0, None), (8, 4))
ONE_BLOCK = kernel(_copied, (4,), [rows((2, 4), 0, None)], rows((2, 4), None, None), (2, 4))
REVERSED = kernel(_copied, (4,), [pl.BlockSpec((2, 4), lambda i: (3 - i, 0))],
                  rows((2, 4), 0, None), (8, 4))  # fmt: skip
KERNELS = [
    Example("kernel by rows", BY_ROWS, (f(8, 4), f(1, 4)), smoke=True),
    Example("kernel by tiles", BY_TILES, (f(8, 8), f(1, 8))),
    Example("kernel of sums", SUMS, (f(8, 8),)),
    Example("mapped kernel", jax.vmap(NUMBERED), (f(4, 8, 4),)),
    Example("twice mapped kernel", jax.vmap(jax.vmap(BY_ROWS, (0, None))),
            (f(4, 2, 8, 4), f(4, 1, 4))),
]  # fmt: skip
