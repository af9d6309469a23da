"""What the forward pass gathered is kept for the backward pass where memory allows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar

LAYERS, WIDTH, BATCH = 8, 1024, 1024
PINS = {"params/*": PartitionSpec("data"), "x": PartitionSpec("data")}


def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """Layers whose weights, but for the first, the backward pass reads too."""

    def loss(given: dict[str, jax.Array]) -> jax.Array:
        h = x
        for i in range(LAYERS):
            h = jnp.tanh(h @ given[str(i)])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return {k: params[k] - 0.1 * grads[k] for k in params}, value


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape, scale=0.05), jnp.float32)

    return {str(i): floats(WIDTH, WIDTH) for i in range(LAYERS)}, floats(BATCH, WIDTH)


def gathers(plan: autopar.Plan) -> int:
    return sum(t.count for t in plan.prediction.traffic if t.kind == "all-gather")


def planned(
    method: str = "auto", memory_gb: float | None = None, width: int = WIDTH, batch: int = BATCH
) -> autopar.Plan:
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return autopar.plan(
        step, dict.fromkeys(map(str, range(LAYERS)), weight), x, cluster="8xh100", mesh=(8,),
        pins=PINS, method=method, memory_gb=memory_gb,
    )  # fmt: skip


def test_weights_are_gathered_once_where_there_is_room() -> None:
    roomy = planned()
    assert roomy.sharding.reuse_gathered
    assert gathers(roomy) <= LAYERS + 1 < gathers(planned("fsdp"))


def test_a_recipe_gathers_as_its_textbook_has_it() -> None:
    plan = planned("fsdp")
    assert not plan.sharding.reuse_gathered
    assert gathers(plan) == 2 * LAYERS - 1


def test_where_memory_binds_they_are_gathered_again() -> None:
    """Of layers with so much work that weights are gathered one after the other."""
    roomy = planned(width=2048, batch=8192)
    assert roomy.sharding.reuse_gathered
    limit = (roomy.prediction.peak_bytes - 1) / 2**30
    tight = planned(memory_gb=limit, width=2048, batch=8192)
    assert not tight.sharding.reuse_gathered
    assert gathers(tight) == 2 * LAYERS - 1
    assert tight.prediction.peak_bytes < roomy.prediction.peak_bytes


def test_a_plan_that_keeps_is_saved_and_computes_the_same(
    devices: list[jax.Device], tmp_path: Any
) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load(tmp_path / "plan.json")
    assert loaded == plan
    params, x = arguments()
    wanted, value = jax.jit(step)(params, x)
    parallel = autopar.parallelize(step, plan=loaded)
    got, loss = parallel(params, x)
    assert loss == pytest.approx(float(value), rel=1e-5)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], atol=1e-5)
