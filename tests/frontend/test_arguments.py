"""Arguments of every kind: by position, by keyword, static, nested; and what cannot be traced."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from autopar.errors import ArgumentError, TraceError
from autopar.frontend import StepSpec, split_static, trace
from tests.frontend.tracing import X, checked, graph_of, shape, traced


def _step(state: Any, batch: Any, scale: Any = 1.0, mode: str = "mean") -> Any:
    return {"w": state["w"] + scale}, getattr(jnp, mode)(batch["x"] @ state["w"])


STATE, BATCH = {"w": shape(8, 3)}, {"x": X, "mask": None}


def test_paths_start_with_the_argument_names() -> None:
    graph = graph_of(_step, STATE, BATCH, 2.0)
    assert [i.path for i in graph.inputs] == ["state/w", "batch/x", "scale"]
    assert graph.output_paths == ("0/w", "1")


def test_keyword_arguments_come_sorted_as_jax_flattens_them() -> None:
    graph = graph_of(_step, STATE, scale=2.0, batch=BATCH)
    assert [i.path for i in graph.inputs] == ["state/w", "batch/x", "scale"]
    assert graph_of(_step, scale=2.0, state=STATE, batch=BATCH).donated == ((0, 2),)


def test_a_lone_output_is_called_out() -> None:
    assert graph_of(jnp.sum, X).output_paths == ("out",)


def test_arguments_without_a_name_are_numbered() -> None:
    assert [i.path for i in graph_of(lambda *xs: xs[0] @ xs[1], X, shape(8, 2)).inputs] == [
        "arg0",
        "arg1",
    ]


@pytest.mark.parametrize(
    "spec",
    [
        StepSpec(_step, static_argnums=(3,)),
        StepSpec(_step, static_argnums=(-1,)),
        StepSpec(_step, static_argnames=("mode",)),
        StepSpec(jax.jit(_step, static_argnames="mode"), static_argnums=(3,)),
    ],
)
def test_static_arguments_are_found_by_number_and_name(spec: StepSpec) -> None:
    positional = checked(trace(spec, (STATE, BATCH, 2.0, "max"), {}))
    assert "reduce_max" in [op.kind for op in positional.ops]
    assert positional == checked(trace(spec, (STATE, BATCH), {"scale": 2.0, "mode": "max"}))
    assert split_static(spec, (1, 2, 3, "max"), {}) == ((1, 2, 3), {})
    assert split_static(spec, (1, 2), {"mode": "max", "scale": 3}) == ((1, 2), {"scale": 3})


def test_a_jitted_function_traces_like_a_plain_one() -> None:
    plain, jitted = traced(_step, STATE, BATCH), traced(jax.jit(_step), STATE, BATCH)
    assert plain.key == jitted.key
    assert checked(plain) == checked(jitted)


def test_concrete_and_abstract_arguments_trace_alike() -> None:
    concrete = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (STATE, BATCH))
    assert checked(traced(_step, *concrete)) == checked(traced(_step, STATE, BATCH))


@pytest.mark.parametrize("fun", [partial(_step, mode="max"), eqx.filter_jit(_step)])
def test_names_of_wrapped_functions(fun: Any) -> None:
    assert traced(fun, STATE, BATCH).name == "_step"


def test_an_object_that_is_called_may_have_a_method_called_trace() -> None:
    class Trainer:
        def trace(self) -> None:
            raise AssertionError

        def __call__(self, x: Any) -> Any:
            return x.sum()

    assert traced(Trainer(), X).name == "Trainer"


def test_a_leaf_that_is_no_array_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        traced(_step, STATE, BATCH, 1.0, "mean")
    assert str(caught.value) == (
        "mode of _step is of type str, which is no array.\n"
        "If mode is a constant of the step, say static_argnames='mode'; if mode is a model that "
        "holds functions or settings, pass its arrays alone."
    )


def test_static_arguments_of_a_jitted_function_must_be_told() -> None:
    step = jax.jit(lambda x, n: x * n, static_argnums=1)
    with pytest.raises(ArgumentError, match="traced with 1 arrays but its arguments hold 2: name"):
        traced(step, X, 3)


def test_a_function_that_does_not_trace_is_told_with_its_shapes() -> None:
    def step(params: Any, x: Any) -> Any:
        return x @ params["w"]

    with pytest.raises(TraceError) as caught:
        traced(step, {"w": shape(7, 3)}, X)
    first, shapes, remedy = str(caught.value).split("\n")
    assert first.startswith("step does not trace: TypeError: dot_general requires contracting")
    assert shapes == "It was called with params/w float32[7, 3], x float32[16, 8]."
    assert "jax.jit" in remedy
    assert isinstance(caught.value.__cause__, TypeError)


def test_results_that_are_no_arrays_are_named() -> None:
    def step(x: Any) -> Any:
        return x + 1, {"fun": step, "none": None, "count": 3}

    with pytest.raises(TraceError, match=r"of type .* at output component \[1\]\['fun'\].*s\.py:"):
        traced(step, X)


def test_many_shapes_are_cut_short() -> None:
    def step(xs: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(TraceError, match=r"no \(test_arguments\.py:\d+\)\n.* xs \(9 arrays\)\."):
        traced(step, [X] * 9)
