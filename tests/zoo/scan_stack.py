"""A raw-JAX GPT: `lax.scan` over stacked layers with `jax.checkpoint` on the body."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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

LENGTH, VOCABULARY, LAYERS, WIDTH, HEADS = 16, 128, 4, 32, 4

Layer = dict[str, jax.Array]


class State(NamedTuple):
    """Parameters and optimizer state as a named tuple."""

    params: dict[str, Any]
    opt_state: Any


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def _create_layer(key: jax.Array) -> Layer:
    keys = jax.random.split(key, 6)
    shapes = {
        "wq": (WIDTH, HEADS, WIDTH // HEADS),
        "wk": (WIDTH, HEADS, WIDTH // HEADS),
        "wv": (WIDTH, HEADS, WIDTH // HEADS),
        "wo": (HEADS, WIDTH // HEADS, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    pairs = zip(keys, shapes.items(), strict=True)
    weights = {n: 0.1 * jax.random.truncated_normal(k, -2, 2, s) for k, (n, s) in pairs}
    return weights | {"ln_1": jnp.ones(WIDTH), "ln_2": jnp.ones(WIDTH)}


@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
def _block(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
    h = _norm(x, layer["ln_1"])
    q, k, v = (jnp.einsum("btd,dhc->bhtc", h, layer[name]) for name in ("wq", "wk", "wv"))
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(causal_mask(x.shape[1]), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bhkc->bqhc", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bqhc,hcd->bqd", mixed, layer["wo"])
    h = jax.nn.gelu(_norm(x, layer["ln_2"]) @ layer["up"])
    return x + h @ layer["down"], None


def gpt_scan_raw(optimizer: Optimizer) -> Case:
    """Layers are made by `vmap` over keys and run by `lax.scan` under a remat policy."""
    tx = make_optimizer(optimizer)

    def create_state(key: jax.Array) -> State:
        one, two, three, four = jax.random.split(key, 4)
        params = {
            "embed": 0.1 * jax.random.normal(one, (VOCABULARY, WIDTH)),
            "positions": 0.1 * jax.random.normal(two, (LENGTH, WIDTH)),
            "layers": jax.vmap(_create_layer)(jax.random.split(three, LAYERS)),
            "norm": jnp.ones(WIDTH),
            "head": 0.1 * jax.random.normal(four, (WIDTH, VOCABULARY)),
        }
        return State(params, tx.init(params))

    def loss_fn(params: dict[str, Any], batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]] + params["positions"]
        x, _ = lax.scan(_block, x, params["layers"])
        logits = _norm(x, params["norm"]) @ params["head"]
        return token_cross_entropy(logits, batch["targets"])

    def step(state: State, batch: Any) -> tuple[State, Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, opt_state), metrics

    return Case("gpt_scan_raw", create_state, step, tokens_batch(LENGTH, VOCABULARY))
