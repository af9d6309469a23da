"""What stands for a program of others is planned as that program, on the user's own lines."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from autopar.frontend import StepSpec, trace
from autopar.ir.graph import Graph, Op
from tests.frontend.evaluating import evaluate
from tests.frontend.tracing import checked, graph_of, kinds, shape, traced


def _same(fun: Callable[..., Any], given: Any, rtol: float = 0.0) -> None:
    """The traced program computes what the function does."""
    step = traced(fun, given)
    found = jax.jit(lambda *arrays: evaluate(step.program, arrays))(given, *step.constants)
    for one, other in zip(found, jax.tree.leaves(jax.jit(fun)(given)), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol)


ROWS = np.linspace(-2.0, 3.0, 32, dtype=np.float32).reshape(8, 4)


def _until(x: Any) -> Any:
    """Trips of their own for each row."""
    return lax.while_loop(lambda s: s[0].sum() < 9, lambda s: (s[0] + 1, s[1] + 1), (x, 0))


def _nested(x: Any) -> Any:
    """A loop in a loop, each with trips of its own, and an inner one in rows of its own."""

    def body(s: Any) -> Any:
        h, n = s
        inner = jax.vmap(lambda v: lax.while_loop(lambda u: u < 1, lambda u: u + 0.75, v))(h)
        return inner + _until(h)[1] + 0.5, n + 1

    return lax.while_loop(lambda s: s[0].sum() < 40, body, (x, 0))


def _scanned(x: Any) -> Any:
    """A loop whose trips the data says, in a scan."""
    return lax.scan(lambda c, _: _until(c * 0.5), x, None, length=3)


def _counted(x: Any) -> Any:
    """A fori_loop to a bound of the row's own."""
    return lax.fori_loop(0, (x[0] * 2 + 5).astype(int), lambda i, v: v * 1.5 + i, x)


def _switched(x: Any) -> Any:
    """Branches by row, one of which loops."""
    which = (jnp.abs(x[0]) * 2).astype(int) % 3
    return lax.switch(which, [lambda v: v, lambda v: _until(v)[0], lambda v: -v], x)


def _root(x: Any) -> Any:
    """An implicit root, its derivative by a linear solve."""

    def f(y: Any) -> Any:
        return y**3 + y - x

    def solve(f: Any, y: Any) -> Any:
        return lax.while_loop(
            lambda y: jnp.abs(f(y)).max() > 1e-4, lambda y: y - f(y) / (3 * y * y + 1), y
        )

    return lax.custom_root(f, x, solve, lambda g, y: y / g(jnp.ones_like(y)))


def _key(x: Any) -> Any:
    """A loop that carries a random key."""

    def body(s: Any) -> Any:
        key, h = s
        key, own = jax.random.split(key)
        return key, h + jax.random.uniform(own)

    key = jax.random.fold_in(jax.random.key(0), (x[0] * 8).astype(int))
    return lax.while_loop(lambda s: s[1].sum() < 9, body, (key, x))[1]


LOOPS = [_until, _nested, _scanned, _counted, _switched, _root, _key]


@pytest.mark.parametrize("fun", LOOPS)
def test_rows_end_each_at_its_own_trip(fun: Callable[..., Any]) -> None:
    rows = jax.vmap(fun)
    for op in graph_of(rows, ROWS).walk():
        if op.kind == "while":
            test = op.graphs[0]
            assert test.value(test.outputs[0]).shape == ()
    _same(rows, ROWS)


def test_rows_of_rows_end_each_at_its_own_trip() -> None:
    _same(jax.vmap(jax.vmap(_until)), ROWS.reshape(4, 2, 4))


def test_a_loop_that_all_rows_end_together_stays_as_it_is() -> None:
    rows = jax.vmap(lambda x: lax.fori_loop(0, jnp.int32(3) + len(x), lambda i, v: v + i, x))
    (loop,) = _all(graph_of(rows, ROWS), "while") or _all(graph_of(rows, ROWS), "scan")
    assert "reduce_or" not in kinds(loop.graphs[0])


def test_what_is_written_out_stands_on_the_users_lines() -> None:
    graph = graph_of(jax.vmap(_until), ROWS)
    assert {op.origin.line.partition(":")[0] for op in graph.walk()} == {"test_written_out.py"}


def _all(graph: Graph, kind: str) -> list[Op]:
    return [op for op in graph.walk() if op.kind == kind]


def test_sums_over_a_dim_that_vmap_named_are_sums_over_it() -> None:
    def row(x: Any) -> Any:
        mean, most, least = lax.pmean(x, "b"), lax.pmax(x, "b"), lax.pmin(x, "b")
        return x - mean + most * least, lax.psum({"a": x, "b": x * 2}, "b")

    rows = jax.vmap(row, axis_name="b")
    found = kinds(graph_of(rows, ROWS))
    assert {"reduce_sum", "reduce_max", "reduce_min"} < set(found)
    assert not {"psum", "pmax", "pmin"} & set(found)
    _same(rows, ROWS, rtol=1e-6)


def test_a_reduction_over_no_dims_is_its_operand() -> None:
    rows = jax.vmap(lambda x: jnp.sin(jnp.mean(x)))
    assert kinds(graph_of(rows, shape(8))) == ["div", "sin"]


def test_linear_solves_are_their_factors_forwards_and_backwards() -> None:
    def loss(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.linalg.solve(a, b[..., None]) ** 2)

    found = kinds(graph_of(jax.grad(loss), shape(8, 4, 4), shape(8, 4)))
    assert {"lu", "triangular_solve"} < set(found)
    assert "custom_linear_solve" not in found


def test_calls_of_functions_are_inlined() -> None:
    fun = lax.composite(lambda x: jnp.sin(x) + 1, name="mine.sine")
    assert kinds(graph_of(fun, ROWS)) == ["sin", "add"]
    linear = jax.custom_derivatives.linear_call
    double = lambda x: linear(lambda _, x: x * 2, lambda _, g: g * 2, (), x)  # noqa: E731
    assert kinds(graph_of(double, ROWS)) == ["mul"]


def _foreign(name: str, lowering: Any) -> Primitive:
    """A primitive as other packages make them."""
    made = Primitive(name)
    made.def_impl(lambda x: jnp.sin(x) * 2)
    made.def_abstract_eval(lambda x: x)
    batching.defvectorized(made)
    mlir.register_lowering(made, lowering)
    return made


DOUBLED = _foreign("doubled_sine", mlir.lower_fun(lambda x: jnp.sin(x) * 2, multiple_results=False))
KERNEL = _foreign("kernel_sine", lambda ctx, x: [x])


def test_another_packages_primitive_is_the_function_that_it_compiles_as() -> None:
    assert kinds(graph_of(jax.vmap(DOUBLED.bind), ROWS)) == ["sin", "mul"]


def test_a_kernel_is_not_replaced_by_its_stand_in() -> None:
    assert kinds(graph_of(KERNEL.bind, ROWS)) == ["kernel_sine"]


def test_what_the_user_has_a_rule_for_stays() -> None:
    kept = StepSpec(lambda x: DOUBLED.bind(x), kept=frozenset({"doubled_sine"}))
    assert kinds(checked(trace(kept, (ROWS,), {}))) == ["doubled_sine"]
