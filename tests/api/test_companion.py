"""A companion runs on the train step's mesh, with the state as that step's plan lays it out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError, PlanError

Tree = dict[str, Any]


def loss_of(params: Tree, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)


def train(state: Tree, batch: Any) -> tuple[Tree, jax.Array]:
    loss, slopes = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["mean"], slopes)
    params = jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], mean)
    return {"params": params, "mean": mean}, loss


def fresh() -> Tree:
    up, down = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(up, (16, 64)), "down": jax.random.normal(down, (64, 16))}
    return {"params": params, "mean": jax.tree.map(jnp.zeros_like, params)}


BATCH = np.random.default_rng(0).standard_normal((32, 16), dtype=np.float32)


@pytest.fixture(scope="module")
def trained() -> tuple[autopar.ParallelStep[..., Any], Tree]:
    pins = {"state/mean/up": ("model", None)}  # unlike the weights, so that a mistake shows
    step = autopar.parallelize(
        train, cluster="8xcpu", mesh={"data": 2, "model": 4}, method="fsdp+tp", pins=pins
    )
    state, _ = step(fresh(), BATCH)
    return step, state


def shardings(tree: Any) -> list[Any]:
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("part", ["whole", "params"])
def test_the_state_stays_where_it_is(trained: tuple[Any, Tree], part: str) -> None:
    step, state = trained
    given = state if part == "whole" else state["params"]

    def evaluate(state: Tree, batch: Any) -> jax.Array:
        return loss_of(state["params"], batch)

    companion = step.companion(evaluate if part == "whole" else loss_of)
    plain = loss_of(jax.device_get(state["params"]), BATCH)
    for _ in range(2):  # the state is not consumed
        np.testing.assert_allclose(companion(given, BATCH), plain, rtol=1e-5)
    assert companion.mesh == step.mesh
    wanted = companion.shardings.args[0]
    used = wanted["params"] if part == "whole" else wanted
    assert jax.tree.leaves(used) == shardings(state["params"])
    assert companion.plan.microbatches == 1


def test_a_part_under_another_name_is_refused_where_it_may_be_two(trained: Any) -> None:
    step, state = trained

    def norm(weights: Tree) -> jax.Array:
        return jnp.sum(weights["up"] ** 2)

    with pytest.raises(ArgumentError, match="weights/up may be state/mean/up or state/params/up"):
        step.companion(norm)(state["params"])


def test_what_takes_no_state_is_no_companion(trained: Any) -> None:
    step, _ = trained
    with pytest.raises(ArgumentError, match="is given nothing of the state"):
        step.companion(lambda batch: batch.sum())(BATCH)


def test_stages_have_none() -> None:
    step = autopar.parallelize(train, cluster="8xcpu")
    with pytest.raises(PlanError, match="train has no plan yet"):
        step.companion(loss_of)
    staged = autopar.parallelize(train, cluster="2xcpu", stages=2, microbatches=2)
    staged.plan_for(jax.eval_shape(fresh), BATCH)
    with pytest.raises(PlanError, match="train runs in 2 stages, and a companion runs on one mesh"):
        staged.companion(loss_of)
