"""Microbatches that a recipe does not suit are refused with their rows and the recipe's reason."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InfeasibleError


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
