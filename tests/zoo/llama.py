"""A Llama in Equinox: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.zoo.case import (
    Case,
    Metrics,
    Optimizer,
    causal_mask,
    make_optimizer,
    token_cross_entropy,
    tokens_batch,
)

LENGTH, VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN = 16, 128, 2, 64, 8, 2, 160
HEAD = WIDTH // HEADS


def _weights(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Turn the feature pairs of [batch, time, ..., head] by angles that grow with time."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(half) / half))
    angles = angles.reshape(length, *[1] * (x.ndim - 3), half)
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    one, two = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Layer(eqx.Module):
    """One decoder layer; four query heads share each key and value head."""

    wq: jax.Array
    wkv: jax.Array
    wo: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    norm_1: jax.Array
    norm_2: jax.Array

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        self.wq = _weights(keys[0], WIDTH, HEADS * HEAD)
        self.wkv = _weights(keys[1], WIDTH, 2 * KV_HEADS * HEAD)
        self.wo = _weights(keys[2], HEADS * HEAD, WIDTH)
        self.gate = _weights(keys[3], WIDTH, HIDDEN)
        self.up = _weights(keys[4], WIDTH, HIDDEN)
        self.down = _weights(keys[5], HIDDEN, WIDTH)
        self.norm_1, self.norm_2 = jnp.ones(WIDTH), jnp.ones(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        h = _rms_norm(x, self.norm_1)
        q = _rotate((h @ self.wq).reshape(b, t, KV_HEADS, HEADS // KV_HEADS, HEAD))
        k, v = jnp.moveaxis((h @ self.wkv).reshape(b, t, 2, KV_HEADS, HEAD), 2, 0)
        scores = jnp.einsum("btkgc,bskc->bkgts", q, _rotate(k)) * HEAD**-0.5
        scores = jnp.where(causal_mask(t), scores, -1e30)
        mixed = jnp.einsum("bkgts,bskc->btkgc", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(b, t, HEADS * HEAD) @ self.wo
        h = _rms_norm(x, self.norm_2)
        return x + (jax.nn.silu(h @ self.gate) * (h @ self.up)) @ self.down


class Llama(eqx.Module):
    """Embedding, layers, final norm and an untied head, all of them arrays."""

    embed: jax.Array
    layers: list[Layer]
    norm: jax.Array
    head: jax.Array

    def __init__(self, key: jax.Array) -> None:
        one, two, *rest = jax.random.split(key, 2 + LAYERS)
        self.embed = jax.random.normal(one, (VOCABULARY, WIDTH)) * 0.5
        self.layers = [Layer(k) for k in rest]
        self.norm = jnp.ones(WIDTH)
        self.head = _weights(two, WIDTH, VOCABULARY)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jnp.take(self.embed, tokens, axis=0)
        for layer in self.layers:
            x = layer(x)
        return _rms_norm(x, self.norm) @ self.head


def gqa_llama(optimizer: Optimizer) -> Case:
    """An Equinox module whose leaves are all arrays is the parameter tree itself."""
    tx = make_optimizer(optimizer)

    def create_state(key: jax.Array) -> dict[str, Any]:
        model = Llama(key)
        return {"model": model, "opt_state": tx.init(eqx.filter(model, eqx.is_array))}

    def loss_fn(model: Llama, batch: Any) -> jax.Array:
        return token_cross_entropy(model(batch["tokens"]), batch["targets"])

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(state["model"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["model"])
        model = optax.apply_updates(state["model"], updates)
        return {"model": model, "opt_state": opt_state}, {"loss": loss}

    return Case("gqa_llama", create_state, step, tokens_batch(LENGTH, VOCABULARY))
