"""A model that a step calls twice, for its loss and for a metric, is exact and runs once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

_WIDTH, _ROWS, _LAYERS = 64, 32, 4


def _net(w: Any, x: jax.Array) -> jax.Array:
    for name in sorted(w):
        x = jnp.tanh(x @ w[name])
    return x


def _step(w: Any, x: jax.Array, y: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((_net(w, x) - y) ** 2))(w)
    found = _net(w, x)
    metrics = {"loss": loss, "hits": jnp.mean((found > 0) == (y > 0)), "found": found}
    return jax.tree.map(lambda p, g: p - 0.5 * g, w, grads), metrics


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 4},
        {"stages": 2, "microbatches": 4},
        {"stages": 4, "microbatches": 8, "schedule": "zb-h1"},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "one program",
)
def test_a_model_that_is_called_twice_is_exact(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    w = {
        f"layer{i}": 0.1 * rng.standard_normal((_WIDTH, _WIDTH), np.float32) for i in range(_LAYERS)
    }
    x, y = rng.standard_normal((2, _ROWS, _WIDTH), np.float32)
    step = autopar.parallelize(_step, cluster="8xcpu", donate=False, **options)
    ours, theirs = (w, None), (w, None)
    for _ in range(3):
        ours, theirs = step(ours[0], x, y), jax.jit(_step)(theirs[0], x, y)
        for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_it_runs_once() -> None:
    abstract = [jax.ShapeDtypeStruct(s, "float32") for s in [(_ROWS, _WIDTH)] * 2]
    w = {f"layer{i}": jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32") for i in range(_LAYERS)}
    plan = autopar.plan(_step, w, *abstract, cluster="8xcpu")
    products = sum(op.count for op in autopar.inspect(plan).ops if op.kind == "dot_general")
    # Forward once, and of each layer the gradients of its weights and, but for the first, inputs.
    assert products == 3 * _LAYERS - 1
