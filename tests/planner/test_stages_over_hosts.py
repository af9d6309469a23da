"""Fewer stages than hosts lie over several hosts each, however slow the wires between these are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar

ROWS, WIDTH = 64, 64


def _step(weights: list[Any], rows: Any) -> Any:
    def loss(weights: list[Any]) -> Any:
        h = rows
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, slopes, strict=True)], value


@pytest.mark.parametrize(
    ("layers", "cluster", "stages", "schedule"),
    [(8, "4x1xcpu", 2, "1f1b"), (8, "4x2xcpu", 3, "1f1b"), (8, "8x1xcpu", 4, "zb-v")],
)
def test_stages_that_hosts_share(layers: int, cluster: str, stages: int, schedule: str) -> None:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    plan = autopar.plan(
        _step, weights, rows, cluster=cluster, stages=stages, microbatches=4, schedule=schedule
    )
    sizes = [s.mesh.device_count for s in plan.submeshes]
    hosts, of_each = map(int, cluster.split("x")[:2])
    assert len(sizes) == stages
    assert sum(sizes) == hosts * of_each
    assert max(sizes) > of_each
