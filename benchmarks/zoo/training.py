"""Makes a train step of a flax module that maps one input array to one output array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from benchmarks.models import Batch, Metrics, Model, make_optimizer

LossOf = Callable[[jax.Array, jax.Array], jax.Array]


def trained(module: nn.Module, example: Batch, loss_of: LossOf) -> Model:
    """The AdamW step of a module: `example` has its input "x" and what `loss_of` compares, "y"."""
    tx = make_optimizer("adamw")
    one = example["x"].shape[1:]

    def create_state(key: jax.Array) -> TrainState:
        params = module.init(key, jnp.zeros((1, *one), example["x"].dtype))["params"]
        new: TrainState = TrainState.create(apply_fn=module.apply, params=params, tx=tx)
        return new

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            return loss_of(state.apply_fn({"params": params}, batch["x"]), batch["y"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        new: TrainState = state.apply_gradients(grads=grads)
        return new, {"loss": loss}

    return Model(create_state, step, example)


def classified(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of integer labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def denoised(guess: jax.Array, noise: jax.Array) -> jax.Array:
    """The mean square error of a diffusion model's guess at the noise."""
    return jnp.mean(jnp.square(guess.astype(jnp.float32) - noise))


def images(rows: int, side: int, channels: int = 3) -> Batch:
    """Float32 images, and an integer label of each."""
    return {
        "x": jax.ShapeDtypeStruct((rows, side, side, channels), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
