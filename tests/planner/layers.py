"""A train step of equal layers, and what it is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def train_step(weights: list[jax.Array], batch: jax.Array) -> Any:
    """A step by gradients of layers that are a product each, in modules of their own."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for i, weight in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


def arguments(
    layers: int, width: int, rows: int, dtype: Any = jnp.float32
) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """The step's weights and its batch."""
    weight = jax.ShapeDtypeStruct((width, width), dtype)
    return [weight] * layers, jax.ShapeDtypeStruct((rows, width), dtype)
