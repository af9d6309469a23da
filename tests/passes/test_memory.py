"""A tight limit is kept, by sharding more; one that cannot be kept says what would help."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import MemoryLimitError
from autopar.ir.values import Role
from autopar.passes.base import Setting, Watcher
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import recipe_named
from tests.passes.corners import CORNERS
from tests.passes.driving import (
    Traced,
    assembled,
    largest_error,
    lowered,
    run_listing,
    setting,
    traced,
)

WIDTH = 64


def wide(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Parameters and a momentum that outweigh the batch by far."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    params = {k: state[k] for k in ("up", "down")}
    value, grads = jax.value_and_grad(loss)(params)
    momentum = 0.9 * state["momentum"] + grads["up"]
    new = {"up": params["up"] - 0.1 * momentum, "down": params["down"] - 0.1 * grads["down"]}
    return {**new, "momentum": momentum}, value


@pytest.fixture(scope="module")
def step() -> Traced:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.1)

    state = {
        "up": floats(8, WIDTH * 8),
        "down": floats(WIDTH * 8, 8),
        "momentum": floats(8, WIDTH * 8),
    }
    return traced(wide, state, floats(8, 8))


def peak(step: Traced, given: Setting, method: str = "auto") -> float:
    """What the rows of a plan say that it holds at most."""
    plan = Optimal(recipe=recipe_named(method)).run(step.graph, given)
    reading, whole = assembled(step.graph, replace(given, memory_bytes=1))
    laid = plan.sharding_of
    held = np.zeros(whole.problem.horizon)
    for usage in whole.problem.usages:
        decision = reading.decisions[usage.node]
        assert decision.value is not None
        at = whole.choices[usage.node].index(laid[decision.value.name])
        held[usage.first : usage.last + 1] += usage.nbytes[at]
    return float(held.max())


def test_a_tight_limit_shards_the_state(step: Traced, devices: list[jax.Device]) -> None:
    roomy = setting("8", "8xh100")
    plan = Optimal().run(step.graph, roomy)
    state = [i.value for i in step.graph.inputs if i.role is Role.STATE]
    assert any(plan.sharding_of[v.name].is_replicated for v in state)

    tight = replace(roomy, memory_bytes=int(peak(step, roomy) / 4))
    plan = Optimal().run(step.graph, tight)
    assert all(plan.sharding_of[v.name].axes() == ("data",) for v in state)
    assert plan.outcome.sentence.startswith("Solved exactly")
    assert peak(step, tight) <= tight.memory_bytes
    got = run_listing(step, lowered(step.graph, plan, tight), tight)
    assert largest_error(got, jax.jit(wide)(*step.args)) < 1e-6


def test_less_memory_never_takes_less_time(step: Traced) -> None:
    roomy = setting("8", "8xh100")
    most, seconds = peak(step, roomy), [0.0]
    for share in (1.0, 0.5, 0.2):
        given = replace(roomy, memory_bytes=int(most * share) + 1)
        assert peak(step, given) <= given.memory_bytes
        seconds.append(Optimal().run(step.graph, given).outcome.seconds)
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[1]


def test_a_plan_that_keeps_a_tighter_limit_is_its_plan_too(step: Traced) -> None:
    roomy = setting("8", "8xh100")
    most = peak(step, roomy)
    limits = [2 * int(most), int(most) + 1, int(most / 4)]
    wide, same, tight = Optimal().run_within(step.graph, roomy, limits)
    assert same is wide
    alone = Optimal().run(step.graph, replace(roomy, memory_bytes=limits[1]))
    assert alone.sharding_of == same.sharding_of
    assert tight == Optimal().run(step.graph, replace(roomy, memory_bytes=limits[2]))
    # From tight to wide nothing is known of the wider limit.
    assert list(Optimal().run_within(step.graph, roomy, limits[::-1]))[2] == wide


def test_what_fits_nowhere_is_refused_before_it_is_solved(step: Traced) -> None:
    roomy, solved = setting("8", "8xh100"), list[object]()
    watched = replace(roomy, watchers=(Watcher(lambda slot, *_: solved.append(slot)),))
    brief = Optimal(explain=False)
    with pytest.raises(MemoryLimitError, match="auto found no plan on"):
        brief.run_within(step.graph, watched, (100, 1))
    assert solved == ["build"]
    # The widest of the limits counts.
    plans = brief.run_within(step.graph, watched, (int(peak(step, roomy)), 1))
    assert next(plans).outcome.seconds > 0
    with pytest.raises(MemoryLimitError):
        next(plans)


# -- what cannot be kept ---------------------------------------------------------------------------


def refusal(step: Traced, given: Setting, method: str = "auto") -> str:
    with pytest.raises(MemoryLimitError) as caught:
        Optimal(recipe=recipe_named(method)).run(step.graph, given)
    return str(caught.value)


def suggested(text: str) -> int:
    """The limit that the text suggests, in bytes."""
    found = re.search(r"\(memory_gb=([0-9.e-]+)\)", text)
    assert found is not None, text
    return int(float(found.group(1)) * 2**30)


@pytest.mark.smoke
def test_the_refusal_names_needs_limit_culprits_and_remedy(step: Traced) -> None:
    text = refusal(step, setting("8", "8xh100", memory=1024))
    headline, *faults, remedy = text.splitlines()
    assert headline.startswith("no plan on (data=8) fits 1.00 KiB a device: at its peak")
    assert re.search(
        r"at least [0-9.]+ KiB a device however it is sharded, .* too much\.", headline
    )
    assert 1 <= len(faults) <= 5
    held = "f32[8,512]: 2.00 KiB to 16.0 KiB a device, by"
    assert any("state/" in fault and held in fault for fault in faults)
    assert any(re.search(r"\(test_memory\.py:\d+\)", fault) for fault in faults)
    assert re.fullmatch(r"Use a limit of \S+ \S+ or more \(memory_gb=\S+\)\.", remedy)
    assert "method='auto'" not in remedy


@pytest.mark.parametrize("method", ["auto", "dp", "zero1", "fsdp"])
@pytest.mark.parametrize("mesh", ["8", "2,4"])
def test_the_suggested_limit_is_enough(step: Traced, mesh: str, method: str) -> None:
    given = setting(mesh, "8xh100", memory=1024)
    text = refusal(step, given, method)
    enough = replace(given, memory_bytes=suggested(text))
    Optimal(recipe=recipe_named(method)).run(step.graph, enough)
    assert ("under " + method in text) == (method != "auto")
    assert "however it is sharded" in text
    assert "method='auto'" not in text  # it would not fit either


@pytest.mark.parametrize("name", ["mlp_decay", "partial_carry"])
def test_it_is_enough_for_loops_too(name: str) -> None:
    fun, args = CORNERS[name]
    step, given = traced(fun, *args), setting("2,4", "8xh100", memory=64)
    enough = replace(given, memory_bytes=suggested(refusal(step, given)))
    Optimal().run(step.graph, enough)


def test_pins_are_blamed_where_there_are_any(step: Traced) -> None:
    pins = (("**/up", ((), ())), ("**/momentum", ((), ())))
    given = replace(setting("8", "8xh100", memory=20_000), pins=pins)
    assert "fewer pins" in refusal(step, given)
    Optimal().run(step.graph, replace(given, pins=()))
