"""How far random whole numbers may go, read off the step that they are for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend import StepSpec, trace
from autopar.runtime.validation.numerics import index_bounds

INDEX = jax.ShapeDtypeStruct((6,), jnp.int32)


def bounds(fun: Callable[..., Any], *args: Any) -> dict[int, int]:
    return index_bounds(trace(StepSpec(fun), args, {}).program)


def over_layers(tokens: jax.Array, table: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + table[tokens].sum(), None

    return jax.lax.scan(layer, jnp.zeros(()), None, length=3)[0]


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda i, t: t[i], 40),
        (lambda i, t: t[i[2:] // 1].sum(), 0),  # a division may make anything of it
        (lambda i, t: t[i.reshape(2, 3)].sum() + t[:8][i].sum(), 8),
        (lambda i, t: jnp.take_along_axis(t[:6], i[:, None], axis=1), 5),
        (lambda i, t: jax.nn.one_hot(i, 12) @ t[:12], 12),
        (over_layers, 40),
        (lambda i, t: t * i.sum(), 0),
    ],
    ids=["rows", "divided", "least", "classes", "one_hot", "scan", "none"],
)
def test_bound(fun: Callable[..., Any], expected: int) -> None:
    table = jax.ShapeDtypeStruct((40, 5), jnp.float32)
    assert bounds(fun, INDEX, table).get(0, 0) == expected
