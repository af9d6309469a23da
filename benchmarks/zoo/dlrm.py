"""A recommender after DLRM: large embedding tables, two MLPs, and products of all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import Model
from benchmarks.zoo.functional import Marks, Params, Shapes, dense, dense_shapes, functional

# Rows of eight of the tables of Criteo's terabyte, hashed as MLPerf does it: 35.5 million.
TABLES = tuple(2**n for n in (23, 23, 23, 22, 22, 21, 20, 19))


def dlrm(
    tables: Sequence[int] = TABLES,
    width: int = 128,
    numbers: int = 13,
    bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (1024, 1024, 512, 256),
    batch: int = 65536,
) -> Model:
    """Clicks from numbers and from one id in each table, whose rows are `width` float32s."""
    features = width + (len(tables) + 1) ** 2
    shapes: Shapes = {
        "tables": {f"table_{i}": (rows, width) for i, rows in enumerate(tables)},
        "bottom": _chain_shapes((numbers, *bottom, width)),
        "top": _chain_shapes((features, *top, 1)),
    }

    def loss_of(params: Params, batch: Any, marks: Marks) -> jax.Array:
        x = _chain(params["bottom"], "bottom", batch["numbers"].astype(jnp.bfloat16), marks)
        ids = marks.value("ids", batch["ids"])
        rows = [
            marks.value("looked up", marks.weight(f"tables/table_{i}", table)[ids[:, i]])
            for i, table in enumerate(params["tables"].values())
        ]
        every = jnp.stack([x, *(row.astype(x.dtype) for row in rows)], axis=1)
        pairs = jnp.einsum("bic,bjc->bij", every, every).reshape(x.shape[0], -1)
        both = jnp.concatenate([x, pairs], axis=-1)
        logit = _chain(params["top"], "top", both, marks)[:, 0].astype(jnp.float32)
        clicked = batch["clicked"].astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(logit) - clicked * logit)

    example = {
        "numbers": jax.ShapeDtypeStruct((batch, numbers), jnp.float32),
        "ids": jax.ShapeDtypeStruct((batch, len(tables)), jnp.int32),
        "clicked": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return functional(shapes, loss_of, example)


def _chain_shapes(widths: Sequence[int]) -> Shapes:
    return {f"dense_{i}": dense_shapes(*pair) for i, pair in enumerate(pairwise(widths))}


def _chain(params: Params, path: str, x: jax.Array, marks: Marks) -> jax.Array:
    """Matrices with relu between them."""
    for i, (name, own) in enumerate(params.items()):
        x = jax.nn.relu(x) if i else x
        x = marks.value("rows", dense(own, f"{path}/{name}", x, marks))
    return x
