"""Long short-term memory: scans over time in Flax and by hand, read off at the last step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from tests.zoo.case import (
    BATCH,
    Case,
    Metrics,
    Optimizer,
    classes_batch,
    make_optimizer,
    token_cross_entropy,
)

LENGTH, INPUTS, HIDDEN, CLASSES = 12, 8, 32, 10


class Reader(nn.Module):
    """A Flax `nn.RNN` over time and a head on its last output."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        outputs = jnp.asarray(nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(x))
        return nn.Dense(CLASSES)(outputs[:, -1])


def lstm(optimizer: Optimizer) -> Case:
    """The recurrent layer of Flax."""
    model, tx = Reader(), make_optimizer(optimizer)

    def create_state(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, jnp.zeros((BATCH, LENGTH, INPUTS)))
        return params, tx.init(params)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return token_cross_entropy(jnp.asarray(model.apply(params, batch["x"])), batch["y"])

    def step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Metrics]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return Case("lstm", create_state, step, classes_batch((LENGTH, INPUTS), CLASSES))


def lstm_raw(optimizer: Optimizer) -> Case:
    """A cell by hand under `lax.scan`, time first, with the weights closed over."""
    tx = make_optimizer(optimizer)

    def create_state(key: jax.Array) -> dict[str, Any]:
        one, two = jax.random.split(key)
        rows = INPUTS + HIDDEN
        params = {
            "cell": jax.random.normal(one, (rows, 4 * HIDDEN)) / jnp.sqrt(rows),
            "bias": jnp.zeros(4 * HIDDEN).at[HIDDEN : 2 * HIDDEN].set(1.0),
            "head": jax.random.normal(two, (HIDDEN, CLASSES)) / jnp.sqrt(HIDDEN),
        }
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def cell(
            carry: tuple[jax.Array, jax.Array], x: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            h, c = carry
            gates = jnp.concatenate([x, h], axis=-1) @ params["cell"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        x = jnp.swapaxes(batch["x"], 0, 1)
        zeros = jnp.zeros((x.shape[1], HIDDEN))
        (h, _), _ = lax.scan(cell, (zeros, zeros), x)
        return token_cross_entropy(h @ params["head"], batch["y"])

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return Case("lstm_raw", create_state, step, classes_batch((LENGTH, INPUTS), CLASSES))
