"""A factor taken out of a loop: the loop reads 1, its sums are scaled where they are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import GraphError
from autopar.frontend import TracedStep
from autopar.frontend.rewrite.rescale import rescale
from autopar.ir.batching import Rescale
from tests.frontend.evaluating import evaluate, values
from tests.frontend.tracing import checked, shape, traced


def _step(w: jax.Array, x: jax.Array) -> Any:
    value, grad = jax.value_and_grad(lambda w: jnp.log(jnp.mean(jnp.exp(jnp.tanh(x @ w)))))(w)
    return w - 0.1 * grad, value, jnp.sum(grad)


STEP = traced(_step, shape(4, 2), shape(8, 4))


def _given() -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((4, 2), (8, 4))]


def _names(step: TracedStep) -> tuple[str, str]:
    """The scalar that the backward pass starts from, and the gradient that it ends in."""
    ops = step.graph.ops
    spread = next(o for o in ops if o.kind == "broadcast_in_dim" and o.value_operands)
    product = [o for o in ops if o.kind == "dot_general"][-1]
    return spread.value_operands[0], product.results[0].name


def test_the_step_computes_the_same() -> None:
    value, total = _names(STEP)
    again = rescale(STEP, (Rescale(value, (total,)),))
    assert checked(again) == again.graph
    for got, want in zip(
        evaluate(again.program, _given()), evaluate(STEP.program, _given()), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-6)


def test_the_loop_no_longer_reads_the_value() -> None:
    value, total = _names(STEP)
    again = rescale(STEP, (Rescale(value, (total,)),))
    readers = [o.kind for o in again.graph.ops if value in o.value_operands]
    assert len(readers) == 1
    ref = int(total.removeprefix("%"))
    plain, scaled = (values(s.program, _given()) for s in (STEP, again))
    factor = plain[int(value.removeprefix("%"))]
    np.testing.assert_allclose(scaled[ref] * factor, plain[ref], rtol=1e-6)
    assert abs(float(factor) - 1) > 0.01


@pytest.mark.parametrize(
    ("value", "said"),
    [("%1", r"%1 cannot be taken out .* float32\[8,4\]"), ("%999", "no value of the step")],
)
def test_what_is_no_scalar_is_refused(value: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        rescale(STEP, (Rescale(value, (_names(STEP)[1],)),))


def test_a_sum_that_the_value_does_not_reach_is_refused() -> None:
    value, _ = _names(STEP)
    early = STEP.graph.ops[0].results[0].name
    with pytest.raises(GraphError, match=f"{value} reaches {early} in no way"):
        rescale(STEP, (Rescale(value, (early,)),))
