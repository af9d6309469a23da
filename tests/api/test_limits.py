"""What is refused for want of memory says which limit would do, and that one does."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import InfeasibleError, MemoryLimitError
from tests.zoo import cases

WIDTH, HIDDEN, BATCH = 256, 1024, 64
PIN = {"params/up": PartitionSpec()}


def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """Two layers, gathered where weights are sharded: copies that no row of memory counts."""

    def loss(given: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ given["up"]) @ given["down"]) ** 2)

    grads = jax.grad(loss)(params)
    return {k: params[k] - 0.1 * grads[k] for k in params}


def shaped(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def plan(memory_gb: float, **options: Any) -> autopar.Plan:
    params = {"up": shaped(WIDTH, HIDDEN), "down": shaped(HIDDEN, WIDTH)}
    return autopar.plan(
        step, params, shaped(BATCH, WIDTH), cluster="8xh100", memory_gb=memory_gb, **options
    )


def suggested(text: str) -> float:
    found = re.search(r"\(memory_gb=([0-9.e-]+)\)", text)
    assert found is not None, text
    return float(found.group(1))


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"mesh": (8,)},
    {"mesh": (2, 4), "pins": PIN},
    {"mesh": (8,), "method": "fsdp"},
    {"mesh": (2, 4), "method": "hsdp", "pins": PIN},
    {"mesh": (8,), "method": "dp"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_suggested_limit_does(options: dict[str, Any]) -> None:
    with pytest.raises(MemoryLimitError) as caught:
        plan(1e-6, **options)
    enough = suggested(str(caught.value))
    kept = plan(enough, **options)
    assert kept.prediction.peak_bytes <= kept.origin.memory_bytes <= enough * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "lstm_raw"])
def test_the_suggested_limit_does_for_the_zoo(name: str) -> None:
    case = cases("adam")[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(case.step, state, case.batch(0), cluster="8xcpu", mesh=(8,), memory_gb=1e-6)
    enough = suggested(str(caught.value))
    autopar.plan(case.step, state, case.batch(0), cluster="8xcpu", mesh=(8,), memory_gb=enough)


def test_a_pin_is_blamed_at_the_door() -> None:
    """A whole `up` takes 1 MiB; sharded, all of the step fits that."""
    with pytest.raises(MemoryLimitError, match=r"\* pin 'params/up' = P\(None, None\): without it"):
        plan(1 / 1024, mesh=(8,), pins={"params/up": PartitionSpec(None, None)})
    plan(1 / 1024, mesh=(8,))


def test_a_recipe_is_blamed_at_the_door() -> None:
    with pytest.raises(MemoryLimitError, match=r"\* method='dp': without it"):
        plan(2 / 1024, mesh=(8,), method="dp")
    plan(2 / 1024, mesh=(8,))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.6, 0.85])
def test_no_recipe_is_predicted_cheaper_within_the_same_limit(share: float) -> None:
    case = cases("adam")["mlp"]
    state = jax.eval_shape(case.create_state, jax.random.key(0))

    def seconds(method: str, memory_gb: float | None) -> float:
        try:
            plan = autopar.plan(
                case.step, state, case.batch(0), cluster="8xh100", mesh=(2, 4), method=method,
                memory_gb=memory_gb,
            )  # fmt: skip
        except InfeasibleError:
            return float("inf")
        limit = plan.origin.memory_bytes
        assert plan.prediction.peak_bytes <= limit
        return plan.prediction.seconds

    roomy = autopar.plan(case.step, state, case.batch(0), cluster="8xh100", mesh=(2, 4))
    limit = share * roomy.prediction.peak_bytes / 2**30
    recipes = ("dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "fsdp+tp", "sequence")
    least = min(seconds(m, limit) for m in recipes)
    assert seconds("auto", limit) <= least * (1 + 1e-9)
