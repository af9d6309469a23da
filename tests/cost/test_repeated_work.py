"""Loops in which XLA for GPUs would repeat products, were it asked to pipeline gathers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.compiler_options import PIPELINED

GATHERS = PIPELINED["all-gather"]


def layer(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    x = x + jnp.tanh(x @ first) @ second
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1)


def accumulated(weights: Any, batch: jax.Array) -> Any:
    """Gradients summed over microbatches by hand: one forward pass needs nothing of another."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for first, second in zip(weights[::2], weights[1::2], strict=True):
            x = layer(x, first, second)
        return jnp.mean(x**2)

    def one(sums: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(weights, x)), None

    zeros = jax.tree.map(jnp.zeros_like, weights)
    sums, _ = jax.lax.scan(one, zeros, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, sums), ()


def layered(weights: Any, batch: jax.Array) -> Any:
    """Layers in a scan: what a trip gathers of its values comes from the trip before."""

    def loss(weights: Any) -> jax.Array:
        out, _ = jax.lax.scan(lambda x, w: (layer(x, *w), None), batch, weights)
        return jnp.mean(out**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


def options(step: Any, asked: dict[str, bool | int | str] | None = None) -> dict[str, Any]:
    """The options of a step of four microbatches or one, whose loop gathers activations."""
    loops_over_layers = step is layered
    stack = (4,) if loops_over_layers else ()
    shapes = [(*stack, 512, 2048), (*stack, 2048, 512)] * (1 if loops_over_layers else 2)
    weights = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    rows = (8, 256, 512) if loops_over_layers else (4, 8, 256, 512)
    batch = jax.ShapeDtypeStruct(rows, jnp.float32)
    parallel = autopar.parallelize(
        step, cluster="8xh100", mesh=(2, 4), method="sequence", cache=False, compiler_options=asked
    )
    plan = parallel.plan_for(weights, batch)
    assert any(t.kind == "all-gather" for t in plan.prediction.traffic)
    return dict(plan.compiler_options)


def test_gathers_are_not_pipelined_in_a_loop_over_microbatches() -> None:
    """XLA would run a forward pass of the next microbatch for each of its gathers."""
    assert GATHERS not in options(accumulated)


def test_they_are_in_a_loop_over_layers() -> None:
    assert options(layered)[GATHERS] is True


@pytest.mark.parametrize("value", [True, False])
def test_unless_asked_for(value: bool) -> None:
    assert options(accumulated, {GATHERS: value})[GATHERS] is value
