"""Model FLOPs are those of the products, forward and backward; recomputation does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

ROWS, WIDTH, LAYERS = 64, 32, 3
ONE = 2 * ROWS * WIDTH * WIDTH


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w)


def planned(apply: Callable[..., Any], **options: Any) -> autopar.Plan:
    """The plan of a step of layers in a scan, and one more, of which the first gives no dx."""

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = jax.lax.scan(lambda h, w: (apply(h, w), None), x, ws)[0]
            return jnp.mean(apply(h, ws[0]) ** 2)

        return ws - 0.1 * jax.grad(loss)(ws)

    shape: Any = jax.ShapeDtypeStruct
    arrays = shape((LAYERS, WIDTH, WIDTH), jnp.float32), shape((ROWS, WIDTH), jnp.float32)
    return autopar.plan(step, *arrays, cluster="8xh100", **options)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_recomputation_does_not_count(again: bool) -> None:
    p = planned(jax.checkpoint(layer) if again else layer, mesh=8).prediction
    assert p.model_flops == 3 * (LAYERS + 1) * ONE
    assert p.mfu(p.seconds) == p.model_flops / (p.peak_flops * p.seconds)
    assert sum(seconds for _, seconds in p.roofline) == pytest.approx(p.seconds)


def test_microbatches_do_not_change_them() -> None:
    plan = planned(layer, mesh=8, microbatches=4)
    assert plan.prediction.model_flops == 3 * (LAYERS + 1) * ONE
    assert plan.rate(0.5).items_per_second == ROWS / 0.5
    assert plan.prediction.roofline[-1][0] == "idle" or not plan.prediction.bubble_seconds
