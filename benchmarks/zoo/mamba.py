"""A state-space language model after Mamba: a selective scan over time in scanned layers."""

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
    dense,
    dense_shapes,
    embedded,
    functional,
    next_token_loss,
    norm_shapes,
    normed,
    stacked,
    through_layers,
)

TAPS = 4  # of the causal convolution


def mamba(
    layers: int = 48,
    width: int = 1024,
    states: int = 16,
    vocabulary: int = 50304,
    sequence: int = 1024,
    batch: int = 16,
    remat: bool = False,
) -> Model:
    """Mamba of 370 M parameters and a head of its own: twice as wide inside as between layers."""
    inner, rank = 2 * width, width // 16
    layer: Shapes = {
        "norm_1": norm_shapes(width, bias=False),
        "mixer": {
            "up": dense_shapes(width, inner, bias=False),
            "gate": dense_shapes(width, inner, bias=False),
            "taps": {"channels": (TAPS, inner), "bias": (inner,)},
            "select": dense_shapes(inner, rank + 2 * states, bias=False),
            "step": dense_shapes(rank, inner),
            "decay": {"channels": (states, inner)},
            "skip": {"scale": (inner,)},
            "down": dense_shapes(inner, width, bias=False),
        },
    }
    shapes: Shapes = {
        "tokens": {"embedding": (vocabulary, width)},
        "layers": stacked(layers, layer),
        "norm": norm_shapes(width, bias=False),
        "head": dense_shapes(width, vocabulary, bias=False),
    }
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)

    def loss_of(params: Params, batch: Any, marks: Marks) -> jax.Array:
        x = embedded(params["tokens"], "tokens", batch["tokens"], marks)
        x = through_layers(partial(_layer, states, marks), x, params["layers"], remat)
        return next_token_loss(params, x, batch["targets"], marks)

    return functional(shapes, loss_of, {"tokens": ids, "targets": ids})


def _layer(states: int, marks: Marks, x: jax.Array, own: Params) -> jax.Array:
    y = marks.value("normed", normed(own["norm_1"], x))
    return marks.value("residual", x + _mixer(own["mixer"], states, y, marks))


def _mixer(own: Params, states: int, x: jax.Array, marks: Marks) -> jax.Array:
    path = "layers/mixer"
    h, gate = (
        marks.value("inside", dense(own[n], f"{path}/{n}", x, marks)) for n in ("up", "gate")
    )
    taps = marks.weight(f"{path}/taps/channels", own["taps"]["channels"]).astype(h.dtype)
    late = jnp.pad(h, ((0, 0), (TAPS - 1, 0), (0, 0)))
    h = sum(late[:, i : i + h.shape[1]] * taps[i] for i in range(TAPS)) + own["taps"][
        "bias"
    ].astype(h.dtype)
    h = marks.value("inside", jax.nn.silu(h))
    # What the token selects: how long a step is, what enters the state and what is read of it.
    rank = own["step"]["kernel"].shape[0]
    chosen = marks.value("selected", dense(own["select"], f"{path}/select", h, marks))
    low, entering, leaving = jnp.split(chosen, [rank, rank + states], axis=-1)
    step = jax.nn.softplus(dense(own["step"], f"{path}/step", low, marks).astype(jnp.float32))
    step = marks.value("inside", step)
    decay = -jnp.exp(marks.weight(f"{path}/decay/channels", own["decay"]["channels"]))
    kept = jnp.exp(step[:, :, None, :] * decay.astype(jnp.float32))
    added = (step * h.astype(jnp.float32))[:, :, None, :] * entering.astype(jnp.float32)[..., None]
    _, state = jax.lax.associative_scan(_after, (kept, added), axis=1)
    y = jnp.einsum("btnc,btn->btc", state, leaving.astype(jnp.float32))
    y = (y + h * own["skip"]["scale"]).astype(x.dtype) * jax.nn.silu(gate)
    return marks.value(
        "projected", dense(own["down"], f"{path}/down", marks.value("inside", y), marks)
    )


def _after(
    one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Two steps of `state * kept + added` as one."""
    return one[0] * two[0], one[1] * two[0] + two[1]
