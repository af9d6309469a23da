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


def test_a_companion_follows_a_plan() -> None:
    step = autopar.parallelize(train, cluster="8xcpu")
    companion = step.companion(loss_of)
    with pytest.raises(PlanError, match="train has no plan yet"):
        companion(fresh()["params"], BATCH)


def test_what_is_left_of_the_state_counts_as_memory(trained: Any) -> None:
    step, _ = trained
    companion = step.companion(loss_of)
    params = jax.eval_shape(fresh)["params"]
    held = sum(a.local_bytes(step.plan.mesh) for a in step.plan.state if "/mean/" in a.path)
    limit = step.plan.origin.memory_bytes - held
    assert held > 0
    assert companion.plan_for(params, BATCH).origin.memory_bytes == limit


def test_another_limit_leaves_the_state_where_it_is(trained: Any) -> None:
    step, _ = trained
    companion = step.companion(loss_of)
    companion.plan_for(jax.eval_shape(fresh)["params"], BATCH)
    lies = {a.path.removeprefix("state/"): a.sharding for a in step.plan.state}
    other = companion.what_if(memory_gb=1, pins={"batch": ("data", None)})
    assert {a.path: a.sharding for a in other.state} == {a.path: lies[a.path] for a in other.state}
    assert other.arguments[-1].sharding.dims == (("data",), ())


# -- planned together ------------------------------------------------------------------------------


def test_a_family_is_planned_by_how_often_each_runs() -> None:
    """Decoding a few rows a thousand times a step reads weights best that lie as it splits them."""
    shape: Any = jax.ShapeDtypeStruct
    params = {"up": shape((8192, 32768), jnp.float32), "down": shape((32768, 8192), jnp.float32)}
    rows, few = shape((65536, 8192), jnp.float32), shape((8, 8192), jnp.float32)

    def step(state: Tree, batch: Any) -> tuple[Tree, jax.Array]:
        loss, slopes = jax.value_and_grad(loss_of)(state["params"], batch)
        return {"params": jax.tree.map(lambda w, g: w - g, state["params"], slopes)}, loss

    def decode(params: Tree, batch: Any) -> jax.Array:
        return jnp.tanh(batch @ params["up"]) @ params["down"]

    seconds: dict[float, tuple[float, float]] = {}
    for weight in (0.0, 1000.0):
        both = autopar.parallelize(step, cluster="8xh100", mesh=(8,))
        companion = both.companion(decode, weight=weight, like=(params, few) if weight else ())
        trained = both.plan_for({"params": params}, rows)
        decoded = companion.plan_for(params, few)
        assert trained.origin.pins == ()
        seconds[weight] = (trained.prediction.seconds, decoded.prediction.seconds)
    alone, together = seconds.values()
    assert together[1] < alone[1]
    assert together[0] + 1000 * together[1] < alone[0] + 1000 * alone[1]


def test_a_family_is_told_of_in_time(trained: Any) -> None:
    step, _ = trained
    with pytest.raises(PlanError, match="train has a plan already, so loss_of cannot count in it"):
        step.companion(loss_of, weight=0.1, like=(fresh()["params"], BATCH))
    fresh_step = autopar.parallelize(train, cluster="8xcpu")
    with pytest.raises(ArgumentError, match=r"weight=0.1\) needs like="):
        fresh_step.companion(loss_of, weight=0.1)
    with pytest.raises(ArgumentError, match="weight is -1; it takes how often it runs"):
        fresh_step.companion(loss_of, weight=-1)


# -- with stages -----------------------------------------------------------------------------------


def scanned_loss(params: Tree, batch: Any) -> jax.Array:
    """Layers in a scan, and a table that the first and the last stage read."""

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, batch @ params["table"], params["blocks"])
    return jnp.mean((x @ params["table"].T - batch) ** 2)


def scanned_train(state: Tree, batch: Any) -> tuple[Tree, jax.Array]:
    loss, slopes = jax.value_and_grad(scanned_loss)(state["params"], batch)
    return {"params": jax.tree.map(lambda w, g: w - 0.01 * g, state["params"], slopes)}, loss


def scanned() -> Tree:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (4, 16, 32), "down": (4, 32, 16)}
    blocks = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    return {"params": {"table": jax.random.normal(keys[2], (16, 16)), "blocks": blocks}}


@pytest.mark.parametrize(
    ("stages", "schedule", "wanted"),
    [
        (2, "interleaved", "forward-only"),
        pytest.param(2, "zb-v", "zb-v", marks=pytest.mark.slow),
        (4, "1f1b", "forward-only"),
    ],
)
def test_a_companion_runs_through_the_stages(stages: int, schedule: str, wanted: str) -> None:
    step = autopar.parallelize(
        scanned_train, cluster="8xcpu", stages=stages, microbatches=4, schedule=schedule
    )
    state, _ = step(scanned(), BATCH)
    companion = step.companion(scanned_loss)
    plain = scanned_loss(jax.device_get(state["params"]), BATCH)
    for _ in range(2):
        np.testing.assert_allclose(companion(state["params"], BATCH), plain, rtol=1e-5)
    plan = companion.plan
    assert plan.schedule == wanted
    assert [s.submesh.devices for s in plan.submeshes] == [
        s.submesh.devices for s in step.plan.submeshes
    ]
    # Every piece of the state is read where it lies.
    lies = {a.path.removeprefix("state/"): (a.submesh, a.sharding) for a in step.plan.state}
    assert {a.path: (a.submesh, a.sharding) for a in plan.state} == lies
    assert {r.part.kind.value for r in companion.planned(state["params"], BATCH).program.parts} <= {
        "F", "setup", "update",
    }  # fmt: skip
    # A saved plan runs as well, and takes the state without consuming it.
    again = autopar.parallelize(scanned_loss, plan=plan)
    for _ in range(2):
        np.testing.assert_allclose(again(state["params"], BATCH), plain, rtol=1e-5)
    step(state, BATCH)


def test_a_batch_that_microbatches_do_not_divide_is_one() -> None:
    step = autopar.parallelize(train, cluster="2xcpu", stages=2, microbatches=4)
    state, _ = step(fresh(), BATCH)
    companion = step.companion(loss_of)
    few = BATCH[:6]
    plain = loss_of(jax.device_get(state["params"]), few)
    np.testing.assert_allclose(companion(state["params"], few), plain, rtol=1e-5)
    assert companion.plan.microbatches == 1
    with pytest.raises(ArgumentError, match="cannot follow the 2 stages of train"):
        step.companion(lambda params: params["up"].sum())(state["params"])


def test_microbatches_alone_leave_a_companion_whole() -> None:
    step = autopar.parallelize(train, cluster="8xcpu", microbatches=2)
    state, _ = step(fresh(), BATCH)
    companion = step.companion(loss_of)
    plain = loss_of(jax.device_get(state["params"]), BATCH)
    np.testing.assert_allclose(companion(state["params"], BATCH), plain, rtol=1e-5)
    assert companion.plan.is_one_program
