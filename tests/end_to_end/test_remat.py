"""A step that recomputes is the plain step, and what it holds really falls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.cost.prices import Prices
from autopar.errors import MemoryLimitError, PlanMismatchError
from autopar.ir.plan_file import plan_from_json, plan_to_json
from autopar.ir.sharding_plan import Recomputation
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.model.residuals import Residuals
from autopar.planner.plan import plan_step
from autopar.planner.remat import Form, form_of
from autopar.planner.request import Request
from autopar.rules import RuleBook
from tests.end_to_end.running import (
    EAGER,
    STEPS,
    differing,
    initial_state,
    numbers,
    plain_leaves,
    zoo_case,
)
from tests.zoo import Optimizer

LAYERS, BATCH, WIDTH, HIDDEN = 6, 64, 16, 512
State = dict[str, jax.Array]


def fullest_plan(model: str, optimizer: Optimizer, method: str) -> autopar.Plan:
    """A plan of a zoo case that recomputes all that it can."""
    case = zoo_case(model, optimizer)
    state = initial_state(model, optimizer)
    step = autopar.parallelize(case.step, cluster=EAGER, mesh=(8,), method=method)
    found = step.planned(state, case.batch(0))
    prices = Prices(EAGER, found.plan.mesh)
    residuals = Residuals(found.graph, found.program.parts[0].listing, prices)
    names = residuals.values(frozenset(range(len(residuals.tradeoff.repeats))))
    form = form_of(Form(found.trace.whole, found.graph), Recomputation(names), RuleBook())
    request = Request(EAGER, found.plan.mesh, PassPipeline.of_options(method), remat=False)
    again = plan_step(replace(found.source, traced=form.traced), request)
    return replace(again.plan, recomputation=Recomputation(names))


@pytest.mark.parametrize(
    ("model", "method", "optimizer"),
    [
        ("mlp", "dp", "sgd"),
        pytest.param("gpt", "megatron", "adam", marks=pytest.mark.slow),
        pytest.param("dropout", "dp", "adam", marks=pytest.mark.ci),
        pytest.param("wide_resnet_bn", "dp", "sgd", marks=pytest.mark.slow),
        ("lstm", "fsdp", "adam"),
    ],
)
def test_recomputing_all_that_can_be_equals_plain_jit(
    model: str, method: str, optimizer: Optimizer
) -> None:
    case = zoo_case(model, optimizer)
    plan = plan_from_json(plan_to_json(fullest_plan(model, optimizer, method)))
    assert plan.recomputed
    step = autopar.parallelize(case.step, plan=plan)
    state, metrics = initial_state(model, optimizer), []
    for i in range(STEPS):
        state, measured = step(state, case.batch(i))
        metrics.append(measured)
    assert not differing(numbers((state, metrics)), plain_leaves(model, optimizer))


def _layer(h: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return h + jnp.tanh(jax.nn.gelu(h @ up) ** 2) @ down


def unrolled(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """Layers whose hidden values outweigh everything else, in a row."""

    def loss(params: State) -> jax.Array:
        h = x
        for i in range(LAYERS):
            h = _layer(h, params["up"][i], params["down"][i])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state)
    return {k: state[k] - 0.1 * grads[k] for k in state}, value


def scanned(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """The same layers by a scan, with no `jax.checkpoint`."""

    def loss(params: State) -> jax.Array:
        def layer(h: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return _layer(h, *w), None

        h, _ = lax.scan(layer, x, (params["up"], params["down"]))
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state)
    return {k: state[k] - 0.1 * grads[k] for k in state}, value


def _given() -> tuple[State, jax.Array]:
    rng = np.random.default_rng(0)
    state = {
        "up": jnp.asarray(rng.standard_normal((LAYERS, WIDTH, HIDDEN), np.float32) * 0.1),
        "down": jnp.asarray(rng.standard_normal((LAYERS, HIDDEN, WIDTH), np.float32) * 0.05),
    }
    return state, jnp.asarray(rng.standard_normal((8 * BATCH, WIDTH), np.float32))


def _plans(
    fun: Any, share: float
) -> tuple[autopar.ParallelStep[..., Any], autopar.ParallelStep[..., Any]]:
    """The step without a limit, and where only `share` of its temporaries fits."""
    free = autopar.parallelize(fun, cluster=EAGER, mesh=(8,), method="dp")
    p = free.plan_for(*_given()).prediction
    budget = p.argument_bytes + share * (p.peak_bytes - p.argument_bytes)
    tight = autopar.parallelize(
        fun, cluster=EAGER, mesh=(8,), method="dp", memory_gb=budget / 2**30
    )
    return free, tight


@pytest.mark.parametrize(("fun", "share"), [(unrolled, 0.7), (unrolled, 0.5), (scanned, 0.4)])
def test_where_memory_binds_the_compiled_step_holds_less(fun: Any, share: float) -> None:
    free, tight = _plans(fun, share)
    plan = tight.plan_for(*_given())
    assert not free.plan.recomputed
    assert plan.recomputed
    assert "recomputes" in str(plan)
    assert plan.prediction.peak_bytes <= plan.origin.memory_bytes
    held = [s.compile(*_given()).memory_analysis().temp_size_in_bytes for s in (free, tight)]
    assert held[1] < 1.1 * share * held[0]
    state, value = jax.jit(fun)(*_given())
    again, same = tight(*_given())
    np.testing.assert_allclose(same, value, rtol=1e-5)
    for name, leaf in state.items():
        np.testing.assert_allclose(again[name], leaf, rtol=1e-4, atol=1e-6)


def test_remat_can_be_switched_off() -> None:
    _, tight = _plans(scanned, 0.4)
    budget = tight.plan_for(*_given()).origin.memory_bytes / 2**30
    step = autopar.parallelize(
        scanned, cluster=EAGER, mesh=(8,), method="dp", memory_gb=budget, remat=False
    )
    with pytest.raises(MemoryLimitError):
        step.plan_for(*_given())


def test_a_plan_that_recomputes_what_the_step_has_not_is_refused() -> None:
    plan = autopar.plan(unrolled, *_given(), cluster=EAGER, mesh=(8,))
    odd = replace(plan, recomputation=Recomputation(("%99999",)))
    with pytest.raises(PlanMismatchError, match="%99999"):
        autopar.parallelize(unrolled, plan=odd).planned(*_given())


def test_a_scan_makes_again_what_takes_longer_to_stack() -> None:
    """Where nothing binds: what is not stacked is neither written nor read.

    The faster plan may share less among devices: its own bytes say what making again saves.
    """
    step = autopar.parallelize(scanned, cluster="8xh100", cache=False)
    plan = step.plan_for(*_given())
    kept = autopar.parallelize(scanned, cluster="8xh100", remat=False, cache=False)
    slower = kept.plan_for(*_given()).prediction
    assert plan.recomputed
    assert plan.recomputation.seconds < 0
    assert "-" in str(plan.recomputation)
    assert plan.prediction.seconds < slower.seconds
    assert plan.recomputation.saved_bytes > 0
