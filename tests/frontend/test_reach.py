"""What depends on a value, into loops and branches and out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontend.rewrite.reach import reached_from
from autopar.frontend.traced import refs
from tests.frontend.tracing import shape, traced

S = shape(3)


def _carried(x: Any, y: Any) -> Any:
    (a, b, c), _ = lax.scan(lambda h, _: ((h[1], h[2], h[2]), None), (y, y, x), None, length=3)
    return a, b, c


def _kept_apart(x: Any, y: Any) -> Any:
    (a, b), s = lax.scan(lambda h, v: ((h[0] + v, h[1] * 2), h[1]), (x, y), x)
    return a, b, s


def _while(x: Any, y: Any) -> Any:
    return lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0] + 1, c[1] * 2), (x, y))


def _deciding(x: Any, y: Any) -> Any:
    return lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + 1, c[1] * 2), (x, y))


def _branches(x: Any, y: Any) -> Any:
    return lax.cond(y[0] > 0, lambda: (x, y), lambda: (y, y))


def _chosen(x: Any, y: Any) -> Any:
    return lax.cond(x[0] > 0, lambda: (y, y), lambda: (y + 1, y * 2))


def _remat(x: Any, y: Any) -> Any:
    return jax.checkpoint(lambda x, y: (x * y, y + 1))(x, y)


@pytest.mark.parametrize(
    ("fun", "reached"),
    [
        (_carried, (True, True, True)),
        (_kept_apart, (True, False, False)),
        (_while, (True, False)),
        (_deciding, (True, True)),
        (_branches, (True, False)),
        (_chosen, (True, True)),
        (_remat, (True, False)),
        (lambda x, y: (x + y, y, jnp.zeros(3)), (True, False, False)),
    ],
)
def test_outputs_reached_from_the_first_argument(
    fun: Callable[..., Any], reached: tuple[bool, ...]
) -> None:
    program = traced(fun, S, shape(3) if fun is not _kept_apart else shape()).program
    found = reached_from(program, program.inputs[:1])
    assert tuple(isinstance(o, int) and o in found for o in program.outputs) == reached
    assert all(
        found.issuperset(e.results)
        for e in program.walk()
        if not e.bodies and not found.isdisjoint(refs(e.operands))
    )
