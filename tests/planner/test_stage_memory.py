"""What the stages of a plan hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.program import PartKind
from autopar.ir.values import Role
from autopar.passes.base import Setting
from autopar.passes.shard.solver.heuristic import min_memory
from tests.planner.layers import arguments, train_step

WIDTH, LAYERS = 64, 4


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_state_of_stages_that_share_devices_is_held_once(schedule: str) -> None:
    def planned(schedule: str) -> autopar.Plan:
        step = autopar.parallelize(
            train_step, cluster="2xcpu", stages=2, microbatches=4, schedule=schedule
        )
        return step.plan_for(*arguments(LAYERS, WIDTH, rows=16))

    apart, sharing = planned("1f1b"), planned(schedule)
    assert len(sharing.stages) == 2 * len(apart.stages)
    # Two layers a device either way: their weights, and sums of gradients.
    assert sharing.prediction.argument_bytes == apart.prediction.argument_bytes


def clipped_step(weights: list[jax.Array], batch: jax.Array) -> Any:
    def loss(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for i, weight in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ weight.astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    grads = jax.grad(loss)(weights)
    scale = 1 / jnp.maximum(1.0, jnp.sqrt(sum(jnp.sum(g**2) for g in grads)))
    return jax.tree.map(lambda w, g: w - 0.1 * scale * g, weights, grads), ()


WEIGHTS, _ = arguments(LAYERS, WIDTH, rows=16)
ROWS = jax.ShapeDtypeStruct((16, WIDTH), jnp.bfloat16)


def test_gradients_that_wait_for_a_norm_stand_where_they_were_summed() -> None:
    """They are cast to the state's dtype before the norm, and read again once it is known."""
    step = autopar.parallelize(clipped_step, cluster="2xcpu", stages=2, microbatches=4)
    planned = step.planned(WEIGHTS, ROWS)
    (mine, *_) = [
        p
        for p in planned.program.parts
        if p.part.submesh == 0 and p.part.kind is PartKind.UPDATE and p.donated
    ]
    given = [mine.part.graph.inputs[i] for i in mine.donated]
    assert len(given) == LAYERS // 2
    assert all(i.role is not Role.STATE for i in given)
    # A step holds state, sums and set-up weights; no gradients beside the sums they came from.
    cost = planned.programs.costs[0]
    assert cost.once_bytes < sum(i.value.item_count * 4 for i in given)


def test_sums_that_gradients_are_written_over_give_the_same_step() -> None:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in keys[1:]]
    batch = jax.random.normal(keys[0], (16, WIDTH), jnp.bfloat16)
    step = autopar.parallelize(clipped_step, stages=2, microbatches=4)
    found, _ = step(list(map(jnp.copy, weights)), batch)
    once = [np.asarray(w) for w in found]
    again, _ = step(found, batch)
    expected, _ = jax.jit(clipped_step)(weights, batch)
    expected_again, _ = jax.jit(clipped_step)(expected, batch)
    for mine, theirs in zip([*once, *again], [*expected, *expected_again], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-3)


def test_memory_rows_of_stages_count_what_their_listings_hold() -> None:
    """Sums and what is set up are held all along, activations for all that is in flight."""
    step = autopar.parallelize(
        clipped_step, cluster="2xcpu", stages=2, microbatches=4, schedule="interleaved"
    )
    planned = step.planned(WEIGHTS, ROWS)
    placed, request = planned.programs.placed, planned.request
    for k, peak in enumerate(planned.programs.peak_bytes):
        given = Setting(request.cluster, placed.contexts[k].tables.prices.mesh, 1)
        setting = replace(placed.setting(k, (), given), memory_bytes=1, partial_sums=False)
        priced = request.shard.price(placed.graphs[k].graph, setting, (), request.shard.recipe)
        posed = priced.within(setting.memory_bytes)
        assert min_memory(posed.assembled.problem).nbytes == pytest.approx(peak, rel=0.15)
