"""A step in other microbatches, from those that it was traced in."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.frontend.microbatch.part_trace import MicrobatchTrace, trace_microbatch
from autopar.frontend.plain_data import plain_params
from autopar.frontend.traced import FlatProgram
from autopar.planner import sliced_step as source_module
from autopar.rules import RuleBook
from tests.planner.slicing import sliced, source
from tests.zoo.registry import cases

_MODELS = ("masked", "gpt_scan", "tied", "moe", "wide_resnet_gn", "unet", "lstm", "vit")


def _marks(model: str, is_slow: bool) -> list[pytest.MarkDecorator]:
    """Each model in one of the two sizes; those that take longest in `make test-ci`."""
    if is_slow:
        return [pytest.mark.slow]
    return [pytest.mark.ci] if model in ("wide_resnet_gn", "vit") else []


@pytest.mark.parametrize(
    ("model", "microbatches"),
    [
        pytest.param(model, count, marks=_marks(model, (i + j) % 2 == 0))
        for i, model in enumerate(_MODELS)
        for j, count in enumerate((2, 4))
    ],
)
def test_it_is_the_step_that_was_traced_so(model: str, microbatches: int) -> None:
    first, traced = sliced(model, source(model).rows), sliced(model, microbatches)
    resized = first.resized(microbatches, RuleBook())
    assert resized is not None
    assert str(resized.batching.graph) == str(traced.batching.graph)
    assert replace(resized.batching, graph=traced.batching.graph) == traced.batching
    part, other = resized.trace.part, traced.trace.part
    assert str(part.graph) == str(other.graph)
    assert _sizes(part.program) == _sizes(other.program)
    bounds = [(y.first, y.last) for y in resized.layers.layers]
    assert bounds == [(y.first, y.last) for y in traced.layers.layers]


def _sizes(program: FlatProgram) -> object:
    return program.input_avals, [
        (e.primitive, plain_params(e.params), e.operand_shapes, e.result_avals)
        for e in program.walk()
    ]


def test_random_numbers_of_rows_are_traced() -> None:
    assert sliced("dropout", 16).resized(4, RuleBook()) is None


def test_a_batch_that_is_split_in_two_is_planned_in_any_microbatches() -> None:
    """JAX keeps the sizes of such a split as numbers of NumPy."""

    def step(w: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> jax.Array:
            x = jnp.concatenate([batch["chosen"], batch["rejected"]])
            for layer in w:
                x = jnp.tanh(x @ layer)
            chosen, rejected = jnp.split(x, 2)
            return -jax.nn.log_sigmoid((chosen - rejected).sum(-1)).mean()

        loss, grads = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), loss

    keys = jax.random.split(jax.random.key(0), 6)
    w = [jax.random.normal(key, (16, 16)) / 4 for key in keys[:4]]
    batch = {
        n: jax.random.normal(k, (16, 16))
        for n, k in zip(("chosen", "rejected"), keys[4:], strict=True)
    }
    made = autopar.parallelize(step, cluster="4xcpu", stages=2, donate=False, cache=False)
    state, plain = w, w
    for _ in range(3):
        (state, loss), (plain, expected) = made(state, batch), jax.jit(step)(plain, batch)
        assert jnp.allclose(loss, expected, rtol=1e-5)
    assert len(made.plan.stages) == 2
    assert all(jnp.allclose(a, b, atol=1e-6) for a, b in zip(state, plain, strict=True))


def test_a_search_traces_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    case, traced_at = cases("adam")["mlp"], list[int]()

    def noted(*given: Any, **named: Any) -> MicrobatchTrace:
        traced_at.append(given[3])
        return trace_microbatch(*given, **named)

    monkeypatch.setattr(source_module, "trace_microbatch", noted)
    step = autopar.parallelize(
        case.step, cluster="2xh100", stages=2, microbatches="auto", cache=False
    )
    plan = step.planned(jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0)).plan
    assert 1 < plan.microbatches < 16
    assert traced_at == [16]
