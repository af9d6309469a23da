"""A two-tower retrieval model: texts of queries and passages, and a softmax over the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import Model
from benchmarks.zoo.functional import (
    Marks,
    Params,
    Shapes,
    attention,
    attention_shapes,
    dense,
    dense_shapes,
    embedded,
    functional,
    mlp,
    mlp_shapes,
    norm_shapes,
    normed,
    stacked,
    through_layers,
)

TEMPERATURE = 0.02


def two_tower(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30528,
    query: int = 64,
    passage: int = 256,
    batch: int = 512,
    remat: bool = False,
) -> Model:
    """Two BERTs of their own weights: each query is to find its passage among the batch's."""
    lengths = {"query": query, "passage": passage}
    shapes = {n: _tower_shapes(layers, width, vocabulary, t) for n, t in lengths.items()}
    example = {n: jax.ShapeDtypeStruct((batch, t), jnp.int32) for n, t in lengths.items()}

    def loss_of(params: Params, batch: Any, marks: Marks) -> jax.Array:
        asked, offered = (
            _tower(params[n], n, batch[n], heads, marks, remat) for n in ("query", "passage")
        )
        scores = asked @ marks.value("candidates", offered).T
        scores = marks.value("scores", scores.astype(jnp.float32)) / TEMPERATURE
        own = jnp.sum(asked * offered, axis=-1).astype(jnp.float32) / TEMPERATURE
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - own)

    return functional(shapes, loss_of, example)


def _tower_shapes(layers: int, width: int, vocabulary: int, length: int) -> Shapes:
    layer: Shapes = {
        "attention": attention_shapes(width), "norm_1": norm_shapes(width),
        "mlp": mlp_shapes(width, 4 * width), "norm_2": norm_shapes(width),
    }  # fmt: skip
    return {
        "tokens": {"embedding": (vocabulary, width)},
        "positions": (length, width),
        "layers": stacked(layers, layer),
        "pooled": dense_shapes(width, width),
    }


def _tower(
    params: Params, path: str, tokens: jax.Array, heads: int, marks: Marks, remat: bool
) -> jax.Array:
    """Unit vectors of texts, [batch, width], from the mean of their tokens."""
    x = embedded(params["tokens"], f"{path}/tokens", tokens, marks)
    x = marks.value("residual", x + params["positions"].astype(x.dtype))
    layer = partial(_layer, f"{path}/layers", heads, marks)
    x = through_layers(layer, x, params["layers"], remat)
    mean = marks.value("rows", jnp.mean(x, axis=1))
    x = dense(params["pooled"], f"{path}/pooled", mean, marks).astype(jnp.float32)
    unit = x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)
    return marks.value("rows", unit.astype(jnp.bfloat16))


def _layer(path: str, heads: int, marks: Marks, x: jax.Array, own: Params) -> jax.Array:
    """A layer of BERT, whose norms come behind its sums."""
    x = marks.value("entered", x)
    x = normed(own["norm_1"], x + attention(own["attention"], f"{path}/attention", x, heads, marks))
    y = marks.value("normed", x)
    return marks.value(
        "residual", normed(own["norm_2"], x + mlp(own["mlp"], f"{path}/mlp", y, marks))
    )
