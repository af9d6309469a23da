"""A GPT whose layers are scanned, trained whole or by low-rank adapters on a frozen base (LoRA)."""

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
    dense_shapes,
    embedded,
    functional,
    mlp,
    mlp_shapes,
    next_token_loss,
    norm_shapes,
    normed,
    on_frozen_base,
    stacked,
    through_layers,
)

ADAPTED = ("query", "key", "value", "out")


def gpt_shapes(layers: int, width: int, vocabulary: int, sequence: int) -> Shapes:
    """The weights of a GPT, a row of each stack for each layer."""
    layer: Shapes = {
        "norm_1": norm_shapes(width), "attention": attention_shapes(width),
        "norm_2": norm_shapes(width), "mlp": mlp_shapes(width, 4 * width),
    }  # fmt: skip
    return {
        "tokens": {"embedding": (vocabulary, width)},
        "positions": (sequence, width),
        "layers": stacked(layers, layer),
        "norm": norm_shapes(width),
        "head": dense_shapes(width, vocabulary, bias=False),
    }


def scanned_gpt(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50304,
    sequence: int = 1024,
    batch: int = 64,
    remat: bool = False,
) -> Model:
    """GPT-2 with a scan over its layers."""
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)

    def loss_of(params: Params, batch: Any, marks: Marks) -> jax.Array:
        x = _entered(params, batch["tokens"], marks)
        x = through_layers(partial(_layer, heads, marks), x, params["layers"], remat)
        return next_token_loss(params, x, batch["targets"], marks)

    shapes = gpt_shapes(layers, width, vocabulary, sequence)
    return functional(shapes, loss_of, {"tokens": ids, "targets": ids})


def lora(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    rank: int = 16,
    vocabulary: int = 50304,
    sequence: int = 1024,
    batch: int = 64,
    remat: bool = False,
) -> Model:
    """The same GPT, of which only adapters of attention's four matrices are trained."""
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)

    def loss_of(variables: Params, batch: Any, marks: Marks) -> jax.Array:
        base, adapters = variables["base"], variables["params"]["layers"]
        x = _entered(base, batch["tokens"], marks)

        def layer(x: jax.Array, own: Params) -> jax.Array:
            frozen, low = own
            adapted = {n: {**frozen["attention"][n], **low["attention"][n]} for n in ADAPTED}
            return _layer(heads, marks, x, {**frozen, "attention": adapted})

        x = through_layers(layer, x, (base["layers"], adapters), remat)
        return next_token_loss(base, x, batch["targets"], marks)

    low = {"attention": {n: {"narrow": (width, rank), "wide": (rank, width)} for n in ADAPTED}}
    base = gpt_shapes(layers, width, vocabulary, sequence)
    example = {"tokens": ids, "targets": ids}
    return on_frozen_base(base, {"layers": stacked(layers, low)}, loss_of, example)


def _entered(params: Params, tokens: jax.Array, marks: Marks) -> jax.Array:
    x = embedded(params["tokens"], "tokens", tokens, marks)
    return marks.value("residual", x + params["positions"].astype(x.dtype))


def _layer(heads: int, marks: Marks, x: jax.Array, own: Params) -> jax.Array:
    y = marks.value("normed", normed(own["norm_1"], x))
    x = x + attention(own["attention"], "layers/attention", y, heads, marks, causal=True)
    y = marks.value("normed", normed(own["norm_2"], x))
    return marks.value("residual", x + mlp(own["mlp"], "layers/mlp", y, marks))
