"""A diffusion transformer (DiT), whose layers are scanned and modulated by time and class."""

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
    functional,
    mlp,
    mlp_shapes,
    plain_norm,
    stacked,
    through_layers,
)
from benchmarks.zoo.training import denoised

WAVES = 256  # features of a time before its MLP


def dit(
    layers: int = 28,
    width: int = 1152,
    heads: int = 16,
    side: int = 32,
    channels: int = 4,
    patch: int = 2,
    classes: int = 1000,
    batch: int = 256,
    remat: bool = False,
) -> Model:
    """DiT-XL/2 on latents of `side` pixels; by default 675 M parameters and 256 tokens."""
    tokens, features = (side // patch) ** 2, patch * patch * channels
    layer: Shapes = {
        "modulate": dense_shapes(width, 6 * width),
        "attention": attention_shapes(width),
        "mlp": mlp_shapes(width, 4 * width),
    }
    shapes: Shapes = {
        "patches": dense_shapes(features, width),
        "positions": (tokens, width),
        "time_1": dense_shapes(WAVES, width),
        "time_2": dense_shapes(width, width),
        "classes": {"embedding": (classes, width)},
        "layers": stacked(layers, layer),
        "modulate": dense_shapes(width, 2 * width),
        "pixels": dense_shapes(width, features),
    }
    latents = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def loss_of(params: Params, batch: Any, marks: Marks) -> jax.Array:
        x = _cut(batch["x"].astype(jnp.bfloat16), patch)
        x = dense(params["patches"], "patches", x, marks)
        x = marks.value("residual", x + params["positions"].astype(x.dtype))
        given = _condition(params, batch, marks)
        layer = partial(_layer, heads, marks, jax.nn.silu(given))
        x = through_layers(layer, x, params["layers"], remat)
        both = dense(params["modulate"], "modulate", jax.nn.silu(given), marks)
        shift, scale = jnp.split(marks.value("rows", both), 2, axis=-1)
        x = marks.value("normed", _modulated(x, shift, scale))
        guess = dense(params["pixels"], "pixels", x, marks)
        return denoised(guess, _cut(batch["y"], patch))

    example = {"x": latents, "y": latents, "time": label, "class": label}
    return functional(shapes, loss_of, example)


def _condition(params: Params, batch: Any, marks: Marks) -> jax.Array:
    """A vector of each row's time and class."""
    rates = 10000.0 ** (-jnp.arange(WAVES // 2) / (WAVES // 2))
    angles = batch["time"].astype(jnp.float32)[:, None] * rates
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(jnp.bfloat16)
    time = marks.value("rows", dense(params["time_1"], "time_1", waves, marks))
    time = marks.value("rows", dense(params["time_2"], "time_2", jax.nn.silu(time), marks))
    table = marks.weight("classes/embedding", params["classes"]["embedding"])
    return time + marks.value("rows", table.astype(time.dtype)[batch["class"]])


def _layer(heads: int, marks: Marks, given: jax.Array, x: jax.Array, own: Params) -> jax.Array:
    """A layer with adaLN-Zero: shift, scale and gate of both halves come from the condition."""
    six = marks.value("modulation", dense(own["modulate"], "layers/modulate", given, marks))
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(six, 6, axis=-1)
    y = marks.value("normed", _modulated(x, shift_1, scale_1))
    y = attention(own["attention"], "layers/attention", y, heads, marks)
    x = x + gate_1[:, None] * y
    y = marks.value("normed", _modulated(x, shift_2, scale_2))
    y = mlp(own["mlp"], "layers/mlp", y, marks)
    return marks.value("residual", x + gate_2[:, None] * y)


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    found = plain_norm(x.astype(jnp.float32)).astype(x.dtype) * (1 + scale[:, None])
    return found + shift[:, None]


def _cut(x: jax.Array, patch: int) -> jax.Array:
    """Squares of pixels as tokens, [batch, token, feature]."""
    b, rows, columns, channels = x.shape
    x = x.reshape(b, rows // patch, patch, columns // patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, patch * patch * channels)
