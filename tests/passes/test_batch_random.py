"""Random small steps are either refused or cut exactly; and any number of loops would be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import BatchError
from autopar.passes.batch.exact import Exact
from tests.passes.driving import largest_error
from tests.passes.microbatch_reference import cut
from tests.passes.test_batch_refusals import batch_norm, frozen_norm
from tests.passes.test_batch_steps import WIDTH, Batch, Params, batch, descent, params

TOLERANCE = 2e-5
Op = Callable[[Params, jax.Array, jax.Array], jax.Array]

# Each takes two values that are [rows, width], [1, width] or [rows, 1], and gives such a one.
OPS: dict[str, Op] = {
    "add": lambda w, a, b: a + b,
    "mul": lambda w, a, b: jnp.tanh(a) * b,
    "dot": lambda w, a, b: a @ w["first"] if a.shape[1] == WIDTH else a * 2.0,
    "normalize": lambda w, a, b: a - a.mean(axis=1, keepdims=True),
    "mean": lambda w, a, b: a.mean(axis=0, keepdims=True),
    "max": lambda w, a, b: a.max(axis=0, keepdims=True),
    "classes": lambda w, a, b: a.sum(axis=1, keepdims=True),
    "still": lambda w, a, b: jax.lax.stop_gradient(a),
    "turn": lambda w, a, b: a.T.reshape(a.T.shape).T,
    "mix": lambda w, a, b: a[::-1],
}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=5,
)


def loss_of(
    program: list[tuple[str, int, int]], around: Callable[[Op], Op] = lambda op: op
) -> Callable[[Params, Batch], Any]:
    """A loss that runs a random program, and returns its last value beside."""

    def loss(weights: Params, rows: Batch) -> Any:
        mask = rows["mask"][:, None]
        values = [rows["x"], mask, jnp.tanh(rows["x"] @ weights["first"])]
        for name, one, other in program:
            left, right = values[-1 - one % len(values)], values[-1 - other % len(values)]
            values.append(around(OPS[name])(weights, left, right))
        total = (values[-1] * mask).sum() / mask.sum() + values[2].mean()
        return total, values[-1]

    return loss


@settings(max_examples=25, derandomize=True)
@given(STEPS)
def test_exact_or_refused(program: list[tuple[str, int, int]]) -> None:
    step = descent(loss_of(program), has_aux=True)
    try:
        made = cut(step, (params(), batch()), 4)
    except BatchError:
        return
    got, expected = made(params(), batch()), step(params(), batch())
    assert largest_error(got, expected) < TOLERANCE, str(made.batching)


@settings(max_examples=15, derandomize=True)
@given(STEPS.filter(lambda program: all(name != "mix" for name, _, _ in program)))
def test_nothing_but_a_mix_of_rows_is_out_of_reach(program: list[tuple[str, int, int]]) -> None:
    step = descent(loss_of(program), has_aux=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exact, "_loop_faults", lambda *_: ())
        made = cut(step, (params(), batch()), 4)
    got, expected = made(params(), batch()), step(params(), batch())
    assert largest_error(got, expected) < TOLERANCE, str(made.batching)


@settings(max_examples=10, derandomize=True)
@given(STEPS.filter(lambda program: all(name != "mix" for name, _, _ in program)))
def test_recomputing_takes_no_loop_more(program: list[tuple[str, int, int]]) -> None:
    step = descent(loss_of(program, jax.checkpoint), has_aux=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exact, "_loop_faults", lambda *_: ())
        plain = cut(descent(loss_of(program), has_aux=True), (params(), batch()), 4)
        made = cut(step, (params(), batch()), 4)
    assert made.batching.loops == plain.batching.loops
    got, expected = made(params(), batch()), step(params(), batch())
    assert largest_error(got, expected) < TOLERANCE, str(made.batching)


@pytest.mark.parametrize("loss", [batch_norm, frozen_norm])
def test_more_loops_than_are_offered_would_be_exact(
    loss: Callable[[Params, Batch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exact, "_loop_faults", lambda *_: ())
    made = cut(descent(loss), (params(), batch()), 4)
    assert made.batching.loops == (3 if loss is batch_norm else 2)
    got, expected = made(params(), batch()), descent(loss)(params(), batch())
    assert largest_error(got, expected) < TOLERANCE
