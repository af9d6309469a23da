"""Models that are hard to cut into stages: cross attention, long skips, seven equal layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.zoo.case import (
    BATCH,
    Batch,
    Case,
    Metrics,
    Optimizer,
    causal_mask,
    classes_batch,
    make_optimizer,
    token_cross_entropy,
)

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 2, 6, 24
SIDE, CHANNELS = 8, (6, 8, 10, 12)
INPUTS, CLASSES, SEVEN = 12, 10, 7

Params = dict[str, Any]
Loss = Callable[[Params, Any], jax.Array]


def staged_cases(optimizer: Optimizer) -> dict[str, Case]:
    """Every such case by name, trained with that optimizer."""
    built = (encoder_decoder(optimizer), deep_unet(optimizer), mlp_seven(optimizer))
    return {case.name: case for case in built}


def _case(
    name: str,
    create_params: Callable[[jax.Array], Params],
    loss_fn: Loss,
    batch: Callable[[int], Batch],
    optimizer: Optimizer,
) -> Case:
    """A case in raw JAX: a dictionary of parameters, and one loss."""
    tx = make_optimizer(optimizer)

    def create_state(key: jax.Array) -> dict[str, Any]:
        params = create_params(key)
        return {"params": params, "opt_state": tx.init(params)}

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = jax.tree.map(jnp.add, state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return Case(name, create_state, step, batch)


def _matrices(key: jax.Array, shapes: Mapping[str, tuple[int, ...]]) -> Params:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / np.sqrt(np.prod(shape[:-1]))
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


# -- an encoder and a decoder that looks at all of it from every layer ------------------------

_ATTENTION = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH)}
_ENCODER = _ATTENTION | {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
_DECODER = _ENCODER | {f"cross_{name}": shape for name, shape in _ATTENTION.items()}


def encoder_decoder(optimizer: Optimizer) -> Case:
    """Two encoder layers and two decoder layers, each of which attends to the encoder's end."""

    def create_params(key: jax.Array) -> Params:
        words, *keys = jax.random.split(key, 5)
        layers = zip(("e0", "e1", "d0", "d1"), keys, strict=True)
        params: Params = {n: _matrices(k, _ENCODER if n[0] == "e" else _DECODER) for n, k in layers}
        shapes = {"words": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
        return params | _matrices(words, shapes)

    def loss_fn(params: Params, batch: Any) -> jax.Array:
        read, written = (4.0 * params["words"][batch[name]] for name in ("source", "tokens"))
        for name in ("e0", "e1"):
            read = read + _attend(params[name], "", read, read)
            read = read + _feed_forward(params[name], read)
        for name in ("d0", "d1"):
            written = written + _attend(params[name], "", written, written, causal_mask(LENGTH))
            written = written + _attend(params[name], "cross_", written, read)
            written = written + _feed_forward(params[name], written)
        return token_cross_entropy(_norm(written) @ params["head"], batch["targets"])

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        shape = (3, BATCH, LENGTH)
        source, tokens, targets = rng.integers(VOCABULARY, size=shape, dtype=np.int32)
        return {"source": source, "tokens": tokens, "targets": targets}

    return _case("encoder_decoder", create_params, loss_fn, batch, optimizer)


def _attend(
    layer: Params, prefix: str, x: jax.Array, source: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    x, source = _norm(x), _norm(source)
    q, k, v = (
        (given @ layer[prefix + name]).reshape(*given.shape[:2], HEADS, WIDTH // HEADS)
        for name, given in (("query", x), ("key", source), ("value", source))
    )
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores), v).reshape(x.shape)


def _feed_forward(layer: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(_norm(x) @ layer["up"]) @ layer["down"]


def _norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


# -- a U-Net whose outer skips cross all stages between ----------------------------------------


def deep_unet(optimizer: Optimizer) -> Case:
    """Four resolutions down and up, so that skips cross up to three stages on four."""

    def create_params(key: jax.Array) -> Params:
        ends = {"in": (3, 3, 3, CHANNELS[0]), "out": (3, 3, CHANNELS[0], 1)}
        down = {f"down{i}": (3, 3, a, b) for i, (a, b) in enumerate(_steps())}
        up = {f"up{i}": (3, 3, a + b, a) for i, (a, b) in enumerate(_steps())}
        return _matrices(key, ends | down | up)

    def loss_fn(params: Params, batch: Any) -> jax.Array:
        h, skips = jax.nn.gelu(_conv(batch["image"], params["in"])), list[jax.Array]()
        for i in range(len(CHANNELS) - 1):
            skips.append(h)
            h = jax.nn.gelu(_conv(h, params[f"down{i}"], stride=2))
        for i in reversed(range(len(CHANNELS) - 1)):
            h = jnp.repeat(jnp.repeat(h, 2, axis=1), 2, axis=2)
            h = jax.nn.gelu(_conv(jnp.concatenate([skips[i], h], axis=-1), params[f"up{i}"]))
        return jnp.mean((_conv(h, params["out"])[..., 0] - batch["wanted"]) ** 2)

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        image = rng.standard_normal((BATCH, SIDE, SIDE, 3), dtype=np.float32)
        return {"image": image, "wanted": image.sum(axis=-1)}

    return _case("deep_unet", create_params, loss_fn, batch, optimizer)


def _steps() -> list[tuple[int, int]]:
    return list(pairwise(CHANNELS))


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    strides = (stride, stride)
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# -- layers that no two, three or four stages share evenly -------------------------------------


def mlp_seven(optimizer: Optimizer) -> Case:
    """Seven layers of one shape and a head, to be cut unevenly."""

    def create_params(key: jax.Array) -> Params:
        shapes = {f"w{i}": (INPUTS, INPUTS) for i in range(SEVEN)} | {"head": (INPUTS, CLASSES)}
        return _matrices(key, shapes)

    def loss_fn(params: Params, batch: Any) -> jax.Array:
        h = batch["x"]
        for i in range(SEVEN):
            h = jnp.tanh(h @ params[f"w{i}"])
        return token_cross_entropy(h @ params["head"], batch["y"])

    return _case("mlp_seven", create_params, loss_fn, classes_batch((INPUTS,), CLASSES), optimizer)
