"""Microbatches that a recipe does not suit are refused with their rows and the recipe's reason."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InfeasibleError
from benchmarks import models


def _step(w: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grads, loss


@pytest.mark.parametrize(
    ("method", "mesh", "told"),
    [
        ("dp", None, "the batch has 12 rows .* is not divisible by 8"),
        ("hsdp", None, "the batch has 12 rows .* is not divisible by 8"),
        ("hsdp", (8,), "the mesh .data=8. has only one. Use a mesh of two axes"),
    ],
)
def test_rows_that_do_not_divide_are_told(method: str, mesh: Any, told: str) -> None:
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (24, 16)))
    head = f"no stage of 8xcpu can be sharded by '{method}' with 2 microbatches of 12 rows: "
    with pytest.raises(InfeasibleError, match=head + ".*" + told):
        autopar.plan(_step, w, x, cluster="8xcpu", microbatches=2, method=method, mesh=mesh)


@pytest.mark.ci
def test_stages_without_experts_are_data_parallel_beside_those_with_some() -> None:
    sizes = (2, 64, 4, 4, 128, 256, 2)
    create, step, batch = models.moe(*sizes, sequence=16, batch=32, dtype="float32")
    state = jax.eval_shape(create, jax.random.key(0))
    asked: Any = {"cluster": "4xh100", "stages": 2, "microbatches": 4, "method": "expert"}
    plan = autopar.plan(step, state, batch, **asked)
    assert [len(s.devices) for s in plan.submeshes] == [2, 2]
    # Nothing of a step without any is for this recipe.
    create, step, batch = models.gpt(2, 64, 4, 256, 16, 32, dtype="float32")
    state = jax.eval_shape(create, jax.random.key(0))
    with pytest.raises(InfeasibleError, match="suits submeshes of 1, but not of 2, 4"):
        autopar.plan(step, state, batch, **asked)
