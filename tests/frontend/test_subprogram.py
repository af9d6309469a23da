"""Parts of a program: they join up to the whole, and read only what they are given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import GraphError
from autopar.frontend.rewrite.subprogram import part_program
from tests.frontend.evaluating import evaluate
from tests.frontend.tracing import shape, traced


def _step(w: jax.Array, x: jax.Array) -> Any:
    return jnp.tanh(x @ w).sum(), jnp.float32(3.0), x


STEP = traced(_step, shape(4, 2), shape(3, 4))
W, X = np.ones((4, 2), np.float32), np.arange(12.0, dtype=np.float32).reshape(3, 4)


def test_two_parts_make_the_whole() -> None:
    whole = STEP.program
    product, mapped, summed = (op.results[0].name for op in STEP.graph.ops)
    first = part_program(whole, (0,), ("%0", "%1"), (product,))
    second = part_program(whole, (1, 2), (product,), (summed, 1))
    assert [a.shape for a in first.input_avals] == [(4, 2), (3, 4)]
    assert [a.shape for a in second.input_avals] == [(3, 2)]
    assert mapped not in (product, summed)
    got = evaluate(second, evaluate(first, [W, X]))
    np.testing.assert_allclose(got, _step(jnp.asarray(W), jnp.asarray(X))[:2], rtol=1e-6)


def test_what_is_given_may_be_returned() -> None:
    part = part_program(STEP.program, (), ("%1",), ("%1",))
    np.testing.assert_array_equal(evaluate(part, [X])[0], X)


@pytest.mark.parametrize(
    ("equations", "inputs", "outputs", "said"),
    [
        ((1,), ("%0",), (), r"tanh \(test_subprogram.py:\d+\) in a part reads %2"),
        ((0,), ("%0", "%1"), ("%3",), "returns %3"),
        ((0,), ("%0", "%99"), (), "no value %99"),
    ],
)
def test_a_part_that_does_not_hold_together_is_refused(
    equations: tuple[int, ...], inputs: tuple[str, ...], outputs: tuple[str, ...], said: str
) -> None:
    with pytest.raises(GraphError, match=said):
        part_program(STEP.program, equations, inputs, outputs)
