"""Calls are inlined, loops are kept, dead equations dropped, effects and constants held."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontend.trace.run_once import PRODUCTS
from autopar.ir.graph import Op
from autopar.ir.values import Literal, Role
from autopar.rules import HEAVY
from tests.frontend.evaluating import evaluate
from tests.frontend.tracing import X, graph_of, kinds, paths, shape, traced


@jax.custom_jvp
def _cube(x: Any) -> Any:
    return x * x * x


_cube.defjvp(lambda p, t: (_cube(*p), 3 * p[0] ** 2 * t[0]))


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * jnp.minimum(g, 1),))


def test_calls_are_inlined_each_time() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    assert kinds(graph_of(lambda x: inner(inner(x)), X)) == ["sin", "add", "sin", "add"]


@pytest.mark.parametrize(("fun", "inside"), [(_cube, ["mul", "mul"]), (_clipped, ["sin"])])
def test_custom_derivatives_are_inlined(fun: Any, inside: list[str]) -> None:
    assert kinds(graph_of(fun, X)) == inside
    assert "call" not in str(graph_of(jax.grad(lambda x: fun(x).sum()), X))


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_remat_keeps_its_body(prevent_cse: bool) -> None:
    block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent_cse)
    (op,) = graph_of(block, X).ops
    assert op.param("prevent_cse") is prevent_cse
    assert kinds(op.graphs[0]) == ["sin", "sin"]


def test_loops_keep_their_bodies() -> None:
    def step(x: Any, w: Any, ys: Any) -> Any:
        x, sums = lax.scan(lambda c, y: (c @ w + y, c.sum()), x, ys)
        x = lax.while_loop(lambda c: c.sum() < w.sum(), lambda c: c * 2 + w[0], x)
        return lax.cond(x[0, 0] > 0, lambda a: a + w[0], lambda a: a, x), sums

    graph = graph_of(step, X, shape(8, 8), shape(5, 16, 8))
    ops = {op.kind: op for op in graph.ops}
    assert (ops["scan"].whole("num_consts"), ops["scan"].whole("num_carry")) == (1, 1)
    assert ops["scan"].whole("length") == 5
    assert kinds(ops["scan"].graphs[0]) == ["dot_general", "add", "reduce_sum"]
    assert [kinds(g)[-1] for g in ops["while"].graphs] == ["lt", "add"]
    assert (ops["while"].whole("cond_nconsts"), ops["while"].whole("body_nconsts")) == (1, 1)
    assert [len(g.ops) for g in ops["cond"].graphs] == [0, 4]
    assert graph.flops == sum(op.flops for op in graph.ops)


def test_scans_nest() -> None:
    def inner(c: Any, _: Any) -> Any:
        return lax.scan(lambda d, _: (d * 2.0, None), c, None, length=3)

    (outer,) = graph_of(lambda x: lax.scan(inner, x, None, length=2)[0], X).ops
    (held,) = outer.graphs[0].ops
    assert (held.kind, held.flops, outer.flops) == ("scan", 3 * 128, 6 * 128)


def test_scalars_are_literals_and_arrays_inputs() -> None:
    table = np.arange(8, dtype=np.float32)
    graph = graph_of(lambda x: x * 0.5 + table, X)
    assert paths(graph, Role.CONSTANT) == ["const/0"]
    assert Literal("0.5", "f32") in graph.ops[0].operands


def test_arrays_within_jitted_functions_are_inputs_each_once() -> None:
    table, other = jnp.arange(8.0), jnp.ones((8, 8))

    @jax.jit
    def inner(x: Any) -> Any:
        return (x + table) @ other

    step = traced(lambda x: inner(inner(x)) + table, X)
    graph = graph_of(lambda x: inner(inner(x)) + table, X)
    assert [i.value.shape for i in graph.inputs if i.role is Role.CONSTANT] == [(8,), (8, 8)]
    assert [c.shape for c in step.constants] == [(8,), (8, 8)]
    assert "opaque" not in str(graph)


def test_arrays_within_jitted_bodies_stay_literals() -> None:
    table = jnp.arange(8.0)
    inner = jax.jit(lambda x: x + table)
    (op,) = graph_of(lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, 2)[0], X).ops
    texts = [str(o) for inside in op.graphs[0].ops for o in inside.operands]
    assert len(op.operands) == 2 or "opaque:f32[8]" in texts


def test_dead_equations_are_dropped_and_effects_kept() -> None:
    def step(x: Any) -> Any:
        jnp.cos(x)
        jax.debug.print("sum {s}", s=x.sum())
        lax.scan(lambda c, _: (jax.debug.print("in {c}", c=c[0, 0]), (c, None))[1], x, None, 2)
        return jnp.sin(x)

    found = kinds(graph_of(step, X))
    assert "cos" not in found
    assert [k for k in found if k not in ("scan", "sin", "reduce_sum")] in (
        ["debug_print"],
        ["debug_callback"],
    )
    assert "scan" in found


def test_writes_to_a_mutable_cell_are_kept() -> None:
    def step(x: Any) -> Any:
        cell = jax.new_ref(x)
        cell[...] = x * 2.0
        return cell[...]

    assert {"swap", "get"} <= set(kinds(graph_of(step, X)))


def test_low_precision_and_keys_have_short_names() -> None:
    def step(x: Any, key: Any) -> Any:
        noise = jax.random.bits(key, (2,), jnp.uint8)
        return x.astype(jnp.float8_e4m3fn), x.astype(jnp.bfloat16), noise, jax.random.split(key)

    graph = graph_of(step, X, jax.random.key(0))
    values = map(graph.value, graph.outputs)
    assert [v.type_text for v in values] == [
        "f8e4m3fn[16,8]",
        "bf16[16,8]",
        "u8[2]",
        "key<fry>[2]",
    ]


def test_numbers_that_are_not_finite_become_text() -> None:
    def step(x: Any, i: Any) -> Any:
        return jnp.take(x, i, axis=0, mode="fill", fill_value=jnp.nan)

    gathers: list[Op] = [
        op for op in graph_of(step, X, shape(3, dtype=jnp.int32)).ops if op.kind == "gather"
    ]
    assert gathers[0].param("fill_value") == "nan"


_S = shape(8, 8)


def _net(w: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((8, 8)))
    return (jnp.tanh(x @ w) * mask) @ w


def _products(graph: Any) -> int:
    return kinds(graph).count("dot_general")


def test_a_model_that_is_called_twice_runs_once() -> None:
    """Its loss has gradients and its metric has none: forward products are those of one call."""

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: _net(w, x).sum())(w)
        return loss, grad, (_net(w, x) > 0).mean()

    def once(w: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: _net(w, x).sum())(w)

    assert _products(graph_of(step, _S, _S)) == _products(graph_of(once, _S, _S)) == 5
    # On other values it is another call.
    apart = graph_of(lambda w, x: (_net(w, x), _net(w, x + 1)), _S, _S)
    assert _products(apart) == 4
    # What is cheap is made anew by each.
    assert kinds(graph_of(lambda w, x: _net(_net(w, x), x), _S, _S)).count("iota") == 4


def test_what_is_merged_is_all_that_counts_as_heavy() -> None:
    assert frozenset(PRODUCTS) == HEAVY  # exported modules have a list of their own


def test_what_is_merged_computes_the_same() -> None:
    x = np.random.default_rng(0).standard_normal((8, 8), np.float32)

    def both(x: Any) -> Any:
        return _net(x, x), jnp.cos(_net(x, x)), lax.dot(x, x), lax.dot(x, x, precision="highest")

    program = traced(both, x)
    assert _products(program.graph) == 4  # other precision is another product
    for ours, theirs in zip(evaluate(program.program, [x]), both(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_pass_that_comes_after_an_update_makes_its_own() -> None:
    """The second net reads what the first one makes of x, after it has been updated itself."""

    def step(one: Any, two: Any, x: Any, late: bool) -> Any:
        def loss(one: Any, two: Any) -> Any:
            return (jnp.tanh(x @ one) @ two).sum()

        grad = jax.grad(loss, argnums=1)(one, two)
        return jax.grad(loss)(one, two - grad if late else two)

    at_once = graph_of(lambda one, two, x: step(one, two, x, False), _S, _S, _S)
    in_turn = graph_of(lambda one, two, x: step(one, two, x, True), _S, _S, _S)
    first = next(i.value.name for i in in_turn.inputs)
    assert [sum(first in op.operands for op in g.ops) for g in (at_once, in_turn)] == [1, 2]


def test_neither_checkpoints_nor_barriers_are_merged_away() -> None:
    def again(w: Any, x: Any) -> Any:
        return _net(w, x), _net(lax.optimization_barrier(w), x)

    assert _products(graph_of(again, _S, _S)) == 4
    kept = graph_of(jax.grad(lambda w, x: jax.checkpoint(_net)(w, x).sum()), _S, _S)
    (op,) = (op for op in kept.ops if op.graphs)
    assert kinds(op.graphs[0]).count("dot_general") >= 4  # forward again, and backward
