"""Recomputation rewrites the sealed step: what is repeated, behind what fence, and what stays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontend import TracedStep, build
from autopar.frontend.rewrite.remat import rematerialize, value_names
from autopar.ir.graph import Graph, Op
from tests.frontend.tracing import X, checked, shape, traced, zoo_step

W = shape(4, 8, 8)


def _deep(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        h = x
        for i in range(4):
            h = jnp.tanh(h @ w[i])
        return jnp.sum(h**2)

    return w - 0.1 * jax.grad(loss)(w)


def _scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        def layer(h: jax.Array, m: jax.Array) -> tuple[jax.Array, None]:
            return h + jnp.sin(jnp.tanh(h @ m)), None

        return jnp.sum(lax.scan(layer, x, w)[0] ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def _forward(graph: Graph, *kinds: str) -> list[str]:
    """Values of the forward pass that ops of these kinds make, in scans too."""
    ops = [op for op in graph.walk() if op.origin.region == "forward"]
    return [v.name for op in ops if op.kind in kinds for v in op.results]


def _backward(graph: Graph, kind: str) -> list[Op]:
    return [op for op in graph.ops if op.kind == kind and op.origin.region == "backward"]


def test_nothing_named_is_the_same_step() -> None:
    step = traced(_deep, W, X)
    assert rematerialize(step, ()) is step


def test_repetitions_are_backward_ops_of_the_same_module_and_line() -> None:
    step = traced(_deep, W, X)
    graph = build(step)
    again = rematerialize(step, _forward(graph, "tanh"))
    new = checked(again)
    repeated = _backward(new, "tanh")
    assert len(repeated) == len(_forward(graph, "tanh"))
    lines = {op.origin.line for op in graph.ops if op.kind == "tanh"}
    assert {op.origin.line for op in repeated} <= lines
    assert all("rematted" not in op.origin.module for op in new.ops)
    assert again.key == step.key


def test_what_is_repeated_starts_behind_a_fence_tied_to_the_backward_pass() -> None:
    step = traced(_deep, W, X)
    new = checked(rematerialize(step, _forward(build(step), "tanh")))
    made = {r.name: op for op in new.ops for r in op.results}
    for op in _backward(new, "tanh"):
        fence = made[str(op.operands[0])]
        assert fence.kind == "remat2"
        assert not fence.graphs[0].ops
    last = [fence.operands[-1] for fence in _backward(new, "remat2")]
    assert all(made[str(o)].origin.region == "backward" for o in last)


def test_weights_that_are_cast_again_wait_for_nothing() -> None:
    """What gathers them runs beside other work; a batch, and what is made of it, waits."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            h = x.astype(jnp.bfloat16)
            for i in range(3):
                h = jnp.tanh(h @ w[i].astype(jnp.bfloat16))
            return jnp.sum(h.astype(jnp.float32) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    sealed = traced(step, W, X)
    names = _forward(build(sealed), "tanh", "dot_general", "convert_element_type")
    new = checked(rematerialize(sealed, names))
    made = {r.name: op for op in new.ops for r in op.results}
    waits: dict[str, list[bool]] = {"squeeze": [], "batch": []}
    for fence in _backward(new, "remat2"):
        makers = [made[str(o)] if str(o) in made else None for o in fence.operands]
        tied = any(op is not None and op.origin.region == "backward" for op in makers)
        for op in makers:
            waits.setdefault(op.kind if op is not None else "batch", []).append(tied)
    assert waits["squeeze"] == [False] * 3
    assert waits["batch"] == [True]


@pytest.mark.parametrize("cast", [False, True])
def test_a_weight_that_more_is_made_of_waits(cast: bool) -> None:
    """Its square is run again, which may hold much, once the backward pass is there."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            scale = w.astype(jnp.bfloat16) if cast else w
            return jnp.sum(jnp.tanh(x.astype(scale.dtype) @ jnp.tanh(scale @ scale)) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    sealed = traced(step, shape(8, 8), X)
    names = _forward(build(sealed), "tanh", "dot_general", "convert_element_type")
    new = checked(rematerialize(sealed, names))
    made = {r.name: op for op in new.ops for r in op.results}
    assert _backward(new, "remat2")
    for fence in _backward(new, "remat2"):
        last = made.get(str(fence.operands[-1]))
        assert last is not None
        assert last.origin.region == "backward"


def test_a_chain_is_repeated_as_a_whole() -> None:
    step = traced(_deep, W, X)
    names = _forward(build(step), "tanh", "dot_general")
    new = checked(rematerialize(step, names))
    made = {r.name: op for op in new.ops for r in op.results}
    assert all(made[str(op.operands[0])].kind == "dot_general" for op in _backward(new, "tanh"))


def test_backward_scan_makes_what_the_forward_scan_stacked() -> None:
    step = traced(_scanned, W, X)
    graph = build(step)
    names = _forward(graph, "tanh", "dot_general", "cos", "sin", "mul", "sub", "integer_pow")
    new = checked(rematerialize(step, names))
    before, after = (
        next(op for op in g.ops if op.kind == "scan" and op.origin.region == "forward")
        for g in (graph, new)
    )
    # Only what enters each trip is stacked now: one slice of the stream of activations.
    assert len(before.results) > len(after.results) == 2
    assert after.results[1].shape == (4, 16, 8)
    scan = next(op for op in new.ops if op.kind == "scan" and op.origin.region == "backward")
    assert {"tanh", "dot_general"} <= {op.kind for op in scan.graphs[0].ops}


def test_what_a_backward_scan_makes_again_waits_for_its_carry_and_weights_do_not() -> None:
    step = traced(_scanned, W, X)
    graph = build(step)
    new = checked(rematerialize(step, _forward(graph, "dot_general", "tanh", "sin")))
    scan = next(op for op in new.ops if op.kind == "scan" and op.origin.region == "backward")
    body = scan.graphs[0]
    carry, weight, *_ = (i.value.name for i in body.inputs)
    (fence,) = (op for op in body.ops if op.kind == "remat2")
    assert fence.results[0].shape == X.shape
    assert str(fence.operands[-1]) == carry
    made = {r.name: op for op in body.ops for r in op.results}
    (activated,) = (op for op in body.ops if op.kind == "tanh")
    product = made[str(activated.operands[0])]
    assert [str(o) for o in product.operands] == [fence.results[0].name, weight]  # not fenced


def test_the_same_choice_gives_the_same_program() -> None:
    step = zoo_step("lstm")
    names = _forward(build(step), "tanh", "logistic", "mul", "dot_general")
    one, two = (checked(rematerialize(step, n)) for n in (names, names[::-1]))
    assert str(one) == str(two)


def test_side_effects_are_not_repeated() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> Any:
            h = jnp.tanh(x @ w)
            jax.debug.print("{}", h.sum())
            return jnp.sum(h**2)

        return w - jax.grad(loss)(w)

    sealed = traced(step, shape(8, 8), X)
    new = checked(rematerialize(sealed, value_names(sealed)))
    prints = [e for e in rematerialize(sealed, value_names(sealed)).program.walk() if e.has_effects]
    assert len(prints) == 1
    assert len(_backward(new, "tanh")) == 1


@pytest.mark.parametrize("name", ["dropout", "wide_resnet_bn", "lstm", "gpt_scan_raw"])
def test_any_choice_keeps_the_laws_of_graphs(name: str) -> None:
    step = zoo_step(name)
    for names in (value_names(step), sorted(value_names(step))[::3]):
        checked(rematerialize(step, names))


def test_values_of_a_step_are_those_of_its_graph() -> None:
    step: TracedStep = zoo_step("lstm")
    graph = build(step)
    inputs = {i.value.name for i in graph.inputs}
    assert value_names(step) <= graph.nested_values.keys()
    assert inputs.isdisjoint(value_names(step))
