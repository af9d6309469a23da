"""Two traces of a step agree op for op: constants of the whole batch, sizes of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ArgumentError, BatchError
from autopar.frontend import StepSpec, trace
from autopar.frontend.microbatch.batch_inputs import BatchAxes
from autopar.frontend.microbatch.part_trace import MicrobatchTrace, trace_microbatch
from autopar.ir.values import Literal, Role
from tests.frontend.evaluating import check_sources, cut, rows_together, same_graphs
from tests.frontend.tracing import X, shape
from tests.zoo import cases, of_each_kind

W, Y = shape(8, 8), shape(16, dtype=jnp.int32)


def _zoo(name: str, count: int, *, concrete: bool = False) -> tuple[MicrobatchTrace, Any]:
    case = cases("adam")[name]
    make = case.create_state if concrete else lambda key: jax.eval_shape(case.create_state, key)
    args = make(jax.random.key(0)), case.batch(0)
    return trace_microbatch(StepSpec(case.step), args, {}, count), args


@pytest.mark.parametrize("name", of_each_kind())
@pytest.mark.parametrize("count", [4, 16])
def test_every_zoo_step_has_two_traces_alike(name: str, count: int) -> None:
    step, _ = _zoo(name, count)
    whole, part = step.whole.graph, step.part.graph
    whole.verify()
    part.verify()
    assert same_graphs(step.whole, step.part)
    assert part.output_paths == whole.output_paths
    assert part.donated == whole.donated
    assert step.part.key == step.whole.key
    sizes = {
        i.path: i.value.shape[0] for i in part.inputs if i.role is Role.BATCH and i.value.shape
    }
    assert set(sizes.values()) == {16 // count}


def test_the_key_is_that_of_the_step_on_the_whole_batch() -> None:
    case = cases("adam")["dropout"]
    args = jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0)
    step = trace_microbatch(StepSpec(case.step), args, {}, 4)
    assert step.part.key == trace(StepSpec(case.step), args, {}).key


@pytest.mark.ci
def test_dropout_of_a_zoo_step_is_that_of_the_whole_batch() -> None:
    step, args = _zoo("dropout", 4, concrete=True)
    assert check_sources(step, args) == 4


def test_one_row_gives_the_ops_of_many() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(x @ w) - jnp.max(x, 1, keepdims=True)
        return h, h.reshape(-1, 2).sum(1), h * jnp.arange(len(x))[:, None]

    one = cut(step, (W, X), 16, {"w": None})
    two = cut(step, (W, X), 8, {"w": None})
    assert [op.kind for op in one.part.graph.ops] == [op.kind for op in two.part.graph.ops]
    rng = np.random.default_rng(0)
    given = tuple(rng.standard_normal(s.shape, np.float32) for s in (W, X))
    got = rows_together(cut(step, given, 16, {"w": None}), given, {"w": None})
    for made, want in zip(got, step(*map(jnp.asarray, given)), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-5)


def test_on_one_row_a_size_that_does_not_grow_with_the_rows_is_refused() -> None:
    with pytest.raises(BatchError, match="a size is 256 on 16 rows and 4 on 2"):
        cut(lambda x: (x @ x.T).reshape(-1), (X,), 16)


def test_numbers_made_of_the_batch_size_are_those_of_the_whole() -> None:
    def step(x: jax.Array) -> Any:
        return jnp.mean(x), jnp.sum(x) / len(x), jnp.sum(x, 0) * float(len(x)), jnp.var(x, 0)

    step_ = cut(step, (X,), 4)
    assert _literals(step_.part) == _literals(step_.whole)
    assert {"128.0", "16.0"} <= _literals(step_.part)
    assert cut(step, (shape(4, 8),), 1).microbatches == 1


def _literals(traced: Any) -> set[str]:
    return {o.text for op in traced.graph.walk() for o in op.operands if isinstance(o, Literal)}


def test_one_microbatch_is_the_step_itself() -> None:
    step = cut(lambda x: x.sum(), (X,), 1)
    assert step.whole is step.part
    assert step.index == ""


# -- which inputs have rows ----------------------------------------------------------------


def test_state_scalars_and_keys_have_no_rows() -> None:
    def step(w: jax.Array, x: jax.Array, rate: jax.Array, key: jax.Array, raw: jax.Array) -> Any:
        noise = jax.random.normal(key, w.shape) + jax.random.normal(raw, w.shape)
        return w - rate * (x.T @ x) * noise

    args = W, X, shape(), jax.eval_shape(lambda: jax.random.key(0)), shape(2, dtype=jnp.uint32)
    part = trace_microbatch(StepSpec(step), args, {}, 2).part.graph
    assert [i.value.shape for i in part.inputs] == [(8, 8), (8, 8), (), (), (2,)]


def test_static_and_keyword_arguments() -> None:
    def step(w: jax.Array, power: int, x: jax.Array, *, y: jax.Array) -> Any:
        return w - (x.T @ y[:, None]) ** power

    spec = StepSpec(step, static_argnums=(1,))
    part = trace_microbatch(spec, (W, 2, X), {"y": shape(16)}, 4).part.graph
    assert {i.path: i.value.shape for i in part.inputs} == {"w": (8, 8), "x": (4, 8), "y": (4,)}


def test_axes_by_path() -> None:
    def step(frozen: Any, x: jax.Array) -> jax.Array:
        return jnp.einsum("tbi,ij->tb", x, frozen["a"]["w"]) + frozen["b"]

    args = {"a": {"w": W}, "b": shape()}, shape(3, 16, 8)
    part = cut(step, args, 4, {"frozen/a": None, "x": 1}).part.graph
    assert part.inputs[-1].value.shape == (3, 4, 8)
    assert cut(step, args, 4, {"*/w": None, "x": -2}).part.graph == part


@pytest.mark.parametrize(
    ("axes", "error", "said"),
    [
        (
            None,
            BatchError,
            r"8 or 16 rows.\n\* w: float32\[8,8\].*\n\* x: float32\[16,8\]",
        ),
        ({"w": None, "x": None}, BatchError, "no argument .* axis of rows"),
        ({"v": None}, ArgumentError, "names 'v', .* Those are w, x"),
        ({"x": 2}, ArgumentError, r"axis 2 of x, of shape \[16, 8\]"),
    ],
)
def test_unclear_rows_are_refused(axes: BatchAxes | None, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        cut(lambda w, x: x @ w, (W, X), 4, axes)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"16 rows .* 3 microbatches.*\n?.*1, 2, 4, 8, 16;"):
        cut(lambda x: x.sum(), (X,), 3)


# -- what depends on the batch size --------------------------------------------------------


def _branching(x: jax.Array) -> jax.Array:
    if len(x) % 8:
        return jnp.sin(x).sum()
    return jnp.cos(x).sum()


def _asserting(x: jax.Array) -> jax.Array:
    return (x + np.ones((16, 8), np.float32)).sum()


def _deeper(x: jax.Array) -> jax.Array:
    for _ in range(len(x)):
        x = jnp.sin(x)
    return x.sum()


def _inside(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, _: (_turned(h), None), x, None, length=2)[0].sum()


def _turned(x: jax.Array) -> jax.Array:
    return jnp.flip(x, 0 if len(x) > 8 else 1)


@pytest.mark.parametrize(
    ("fun", "said"),
    [
        (
            _branching,
            r"runs cos -> f32\[16,8\] at test_part_trace.py:\d+, on a part sin",
        ),
        (_deeper, r"on the whole batch it runs sin .*, on a part reduce_sum"),
        (_inside, r"on the whole batch it runs rev .*, on a part rev"),
        (_asserting, r"traces on 16 rows but not on 4"),
    ],
)
def test_structure_that_depends_on_the_batch_size_is_refused(
    fun: Callable[..., Any], said: str
) -> None:
    with pytest.raises(BatchError, match=said):
        cut(fun, (X,), 4)


def test_the_batch_size_as_an_index_is_refused() -> None:
    def last(x: jax.Array, i: jax.Array) -> jax.Array:
        return x[i].sum()

    with pytest.raises(BatchError, match=r"gather at test_part_trace.py:\d+ reads .* \[16, 8\]"):
        cut(last, (X, Y), 4)


def test_a_place_within_each_row_is_no_such_index() -> None:
    def picked(x: jax.Array, i: jax.Array) -> Any:
        return jnp.take_along_axis(x, i[:, None], 1), x[jnp.arange(len(x)), i], x[:, -1]

    given = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32), np.arange(16) % 8
    got = rows_together(cut(picked, given, 4), given)
    for one, other in zip(got, picked(*map(jnp.asarray, given)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_of_places_within_each_row() -> None:
    def step(x: jax.Array, i: jax.Array) -> Any:
        return jax.grad(lambda x: jnp.sum(x[jnp.arange(len(x)), i] ** 2))(x)

    given = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32), np.arange(16) % 8
    got = rows_together(cut(step, given, 4), given)[0]
    np.testing.assert_array_equal(got, step(*map(jnp.asarray, given)))


def test_rows_of_two_dims_are_paired_at_once() -> None:
    def picked(x: jax.Array, i: jax.Array) -> Any:
        n, t, _ = x.shape
        return x[jnp.arange(n)[:, None], jnp.arange(t)[None], i], x[jnp.arange(n), :, i[:, 0]]

    rng = np.random.default_rng(0)
    given = rng.standard_normal((4, 3, 5)).astype(np.float32), rng.integers(5, size=(4, 3))
    got = rows_together(cut(picked, given, 2), given)
    for one, other in zip(got, picked(*map(jnp.asarray, given)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_diagonal_keeps_one_index() -> None:
    def diagonal(x: jax.Array) -> jax.Array:
        i = jnp.arange(x.shape[1])
        return x[:, i, i]

    given = (np.arange(4 * 9.0, dtype=np.float32).reshape(4, 3, 3),)
    got = rows_together(cut(diagonal, given, 2), given)[0]
    np.testing.assert_array_equal(got, diagonal(jnp.asarray(given[0])))
