"""What the stages of a plan hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

WIDTH, LAYERS = 64, 4


def train_step(weights: list[jax.Array], batch: jax.Array) -> Any:
    def loss(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for i, weight in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_state_of_stages_that_share_devices_is_held_once(schedule: str) -> None:
    def planned(schedule: str) -> autopar.Plan:
        step = autopar.parallelize(
            train_step, cluster="2xcpu", stages=2, microbatches=4, schedule=schedule
        )
        weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
        return step.plan_for(weights, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32))

    apart, sharing = planned("1f1b"), planned(schedule)
    assert len(sharing.stages) == 2 * len(apart.stages)
    # Two layers a device either way: their weights, and sums of gradients.
    assert sharing.prediction.argument_bytes == apart.prediction.argument_bytes
