"""Remat opened: the same numbers, nothing merged with the forward pass, regions as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import StepSpec, TracedStep
from autopar.frontend.rewrite.remat import rematerialize, value_names
from autopar.passes.pipeline import PassPipeline
from autopar.planner.plan import plan_step
from autopar.planner.request import Request
from autopar.planner.sliced_step import Source
from autopar.rules import RuleBook
from autopar.runtime.bind import bind_mesh
from autopar.runtime.executor import Executor, Options
from tests.end_to_end.running import EAGER
from tests.frontend.evaluating import evaluate
from tests.frontend.tracing import checked, kinds, shape, traced, without_remat

W, X = shape(3, 8, 8), shape(16, 8)
Layer = Callable[[jax.Array, jax.Array], jax.Array]


def _stepping(layer: Layer) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            h = x
            for i in range(3):
                h = layer(h, w[i])
            return jnp.mean(h**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    return step


def _scanning(layer: Layer) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(lax.scan(lambda h, m: (layer(h, m), None), x, w)[0] ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    return step


def _layer(h: jax.Array, m: jax.Array) -> jax.Array:
    return h + jnp.sin(jnp.tanh(h @ m))


KEPT = jax.checkpoint(_layer)
LOOSE = jax.checkpoint(_layer, prevent_cse=False)
ODD = jax.checkpoint(lambda h, m: KEPT(h, m) + jax.checkpoint(lambda a, b: (a, b, 2.0))(h, m)[0])
STEPS: dict[str, tuple[Callable[..., Any], int]] = {
    "straight": (_stepping(KEPT), 3),
    "scanned": (_scanning(KEPT), 1),
    "loose": (_stepping(LOOSE), 0),
    "odd": (_stepping(ODD), 8),
    "of a policy": (
        _stepping(jax.checkpoint(_layer, policy=jax.checkpoint_policies.dots_saveable)),
        3,
    ),
}


def _given() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s.shape, np.float32)) for s in (W, X)]


@pytest.mark.parametrize(("step", "barriers"), STEPS.values(), ids=STEPS)
def test_opened_it_computes_the_same_behind_a_barrier_for_each_recomputation(
    step: Callable[..., Any], barriers: int
) -> None:
    plain = traced(step, W, X)
    opened = without_remat(plain)
    assert opened.key == plain.key
    assert checked(opened) == opened.graph
    every = [op.kind for op in opened.graph.walk()]
    assert "remat2" in [op.kind for op in plain.graph.walk()]
    assert "remat2" not in every
    assert every.count("optimization_barrier") == barriers
    run = jax.jit(lambda w, x: evaluate(opened.program, [w, x]))
    for got, want in zip(run(*_given()), jax.jit(step)(*_given()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_is_recomputed_is_backward_and_reads_through_the_barrier() -> None:
    graph = without_remat(traced(STEPS["straight"][0], W, X)).graph
    first = kinds(graph).index("optimization_barrier")
    made = {v.name for op in graph.ops[:first] for v in op.results if op.origin.region == "forward"}
    barrier = graph.ops[first]
    assert [op.origin.region for op in graph.ops[: first + 1]].count("backward") > 0
    assert not {op.origin.region for op in graph.ops[first:]} - {"backward", "update"}
    assert {v.name for v in barrier.results} & set(graph.ops[first + 1].value_operands)
    again = next(op for op in graph.ops[first + 1 :] if op.kind == "dot_general")
    assert made.isdisjoint(again.value_operands)


def test_a_step_without_remat_is_left_as_it_is() -> None:
    plain = traced(_stepping(_layer), W, X)
    assert without_remat(plain) is plain


def test_our_own_fences_become_barriers() -> None:
    plain = traced(_stepping(_layer), W, X)
    again = rematerialize(plain, value_names(plain))
    opened = without_remat(again)
    assert kinds(again.graph).count("remat2") > 0
    assert kinds(opened.graph) == [
        "optimization_barrier" if kind == "remat2" else kind for kind in kinds(again.graph)
    ]


@pytest.mark.parametrize("name", ["straight", "scanned"])
def test_an_opened_step_is_planned_and_runs_on_eight_devices(name: str) -> None:
    step = STEPS[name][0]
    opened = without_remat(traced(step, W, X))
    np.testing.assert_allclose(
        _run_planned(opened)[0], jax.jit(step)(*_given())[0], rtol=1e-5, atol=1e-6
    )


def _run_planned(traced: TracedStep) -> Any:
    mesh = autopar.MeshShape(("data",), (8,))
    request = Request(EAGER, mesh, PassPipeline.of_options("dp"), remat=False)
    planned = plan_step(Source(StepSpec(_run_planned), (), {}, traced, RuleBook()), request)
    bound = bind_mesh(mesh, range(8))
    return Executor(planned.trace, planned.program, [bound], Options(donate=False))(_given())
