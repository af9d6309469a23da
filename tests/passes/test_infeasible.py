"""What cannot be met is named, and nothing else: pins, constraints, recipe, the least limit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.errors import InfeasibleError, MemoryLimitError, PinError
from autopar.passes.base import Setting
from autopar.passes.shard.diagnose.infeasible import Posed, Refused
from autopar.passes.shard.model.pins import Pins
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import AbstractRecipe, Free, recipe_named
from autopar.passes.shard.solver.heuristic import min_memory
from autopar.passes.shard.solver.problem import Edge, Problem, Usage
from tests.passes.corners import floats
from tests.passes.driving import Traced, assembled, setting, traced
from tests.passes.problems import joint_peaks, joint_seconds

WHOLE = ((), ())
KIB = 1024


def weights(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """Two weights of 32 KiB each, and next to nothing beside them."""

    def loss(given: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((x @ given["a"]) ** 2) + jnp.mean((x @ given["b"]) ** 2)

    grads = jax.grad(loss)(params)
    return {k: params[k] - 0.1 * grads[k] for k in params}


@pytest.fixture(scope="module")
def step() -> Traced:
    return traced(weights, {"a": floats(8, 1024), "b": floats(8, 1024)}, floats(8, 8))


def given(limit: float, *pins: str) -> Setting:
    roomy = setting("8", "8xh100", memory=int(limit))
    return replace(roomy, pins=tuple((pin, WHOLE) for pin in pins))


def refusal(step: Traced, asked: Setting, method: str = "auto") -> str:
    with pytest.raises(MemoryLimitError) as caught:
        Optimal(recipe=recipe_named(method)).run(step.graph, asked)
    return str(caught.value)


def suggested(text: str) -> int:
    found = re.search(r"\(memory_gb=([0-9.e-]+)\)", text)
    assert found is not None, text
    return int(float(found.group(1)) * 2**30)


def least(step: Traced, asked: Setting) -> float:
    """Under a limit that nothing keeps, every byte is counted."""
    tight = replace(asked, memory_bytes=1)
    return min_memory(assembled(step.graph, tight, asked.pins)[1].problem).nbytes


def blamed(text: str) -> list[str]:
    """The pins that the bullets blame."""
    return re.findall(r"^\* pin '(\S+)'", text, re.MULTILINE)


# -- pins ------------------------------------------------------------------------------------------


def test_one_pin_of_three_is_to_blame(step: Traced) -> None:
    """`params/a` whole takes 32 KiB; `x` whole a quarter of one."""
    free, pinned = least(step, given(1e9)), least(step, given(1e9, "params/a"))
    asked = given((free + pinned) / 2, "x", "params/a")
    text = refusal(step, asked)
    assert blamed(text) == ["params/a"]
    assert "with this pin" in text.splitlines()[0]
    assert "would do, which fits" in text
    Optimal().run(step.graph, replace(asked, pins=asked.pins[:1]))


def test_two_pins_that_only_together_are_too_much(step: Traced) -> None:
    one = least(step, given(1e9, "params/a"))
    both = least(step, given(1e9, "params/a", "params/b"))
    asked = given((one + both) / 2, "params/b", "x", "params/a")
    text = refusal(step, asked)
    assert blamed(text) == ["params/b", "params/a"]
    assert text.count("which fits") == 2
    for kept in ((asked.pins[0], asked.pins[1]), (asked.pins[1], asked.pins[2])):
        Optimal().run(step.graph, replace(asked, pins=kept))


def test_pins_are_not_blamed_where_nothing_would_fit(step: Traced) -> None:
    text = refusal(step, given(KIB, "params/a"))
    assert blamed(text) == []
    assert "however it is sharded" in text
    assert "fewer pins" not in text
    assert re.search(r"\* (params|x)\S* f32\[", text)


def test_a_constraint_in_the_step_is_named_with_its_line() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def constrained(w: jax.Array, x: jax.Array) -> Any:
        whole = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, PartitionSpec()))
        return w - 0.1 * (x.T @ jnp.tanh(whole))

    step = traced(constrained, floats(8, 512), floats(64, 8))
    asked = given(64 * KIB)
    text = refusal(step, asked)
    assert re.search(r"\* with_sharding_constraint at test_infeasible\.py:\d+: without it", text)


# -- recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp", "zero2"])
def test_a_recipe_is_to_blame(step: Traced, method: str) -> None:
    asked = given(40 * KIB)
    text = refusal(step, asked, method)
    assert f"* method='{method}': without it" in text
    assert f"under {method}," in text.splitlines()[0]
    assert "method='auto', which may shard more" in text
    Optimal().run(step.graph, asked)


def test_a_recipe_and_a_pin_together(step: Traced) -> None:
    """fsdp alone fits, and so does the pin alone; both take what the pin and the gathers take."""
    asked = given(20 * KIB, "params/a")
    text = refusal(step, asked, "fsdp")
    assert "params/a" in text


# -- the smallest limit ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "dp", "fsdp"])
@pytest.mark.parametrize("pins", [(), ("params/a",), ("params/a", "params/b", "x")])
def test_the_suggested_limit_is_enough_and_the_least(
    step: Traced, method: str, pins: tuple[str, ...]
) -> None:
    asked = given(KIB, *pins)
    enough = suggested(refusal(step, asked, method))
    recipe = recipe_named(method)
    Optimal(recipe=recipe).run(step.graph, replace(asked, memory_bytes=enough))
    with pytest.raises(MemoryLimitError):
        Optimal(recipe=recipe).run(step.graph, replace(asked, memory_bytes=int(enough * 0.99)))


def test_what_a_plan_is_known_to_need_beside_the_rows_is_counted(step: Traced) -> None:
    asked = replace(given(KIB), weigh=lambda graph, plan: 5e6)
    assert 5e6 < suggested(refusal(step, asked)) < 5.01e6


def held_over_time(seed: int) -> Problem:
    """Five nodes of three choices that hold random bytes at random times."""
    rng = np.random.default_rng(seed)
    spans = [sorted(rng.integers(0, 6, size=2)) for _ in range(8)]
    usages = tuple(
        Usage(int(rng.integers(5)), int(first), int(last), rng.integers(1, 9, size=3).astype(float))
        for first, last in spans
    )
    never = np.where(rng.random((3, 3)) < 0.3, np.inf, 0.0)
    return Problem((np.zeros(3),) * 5, (Edge(0, 1, never),), usages)


@pytest.mark.parametrize("seed", range(30))
def test_the_least_is_near_what_trying_everything_finds(seed: int) -> None:
    problem = held_over_time(seed)
    possible = np.isfinite(joint_seconds(problem))
    best = joint_peaks(problem)[possible].min()
    found = min_memory(problem)
    assert found.bound_bytes <= best <= found.nbytes <= best * 1.2
    assert problem.peak_bytes(found.choice) == found.nbytes
    assert np.isfinite(problem.seconds(found.choice))


# -- contradictions --------------------------------------------------------------------------------


def impossible(step: Traced, together: frozenset[str], pins: Pins) -> Refused:
    """A request in which some pins exclude each other: no two choices of some nodes agree."""
    asked = replace(given(1e9), pins=tuple(pins))

    def pose(kept: Pins, recipe: AbstractRecipe, loose: frozenset[str]) -> Posed:
        priced = Optimal().price(step.graph, asked, kept, recipe, loose)
        posed = priced.within(asked.memory_bytes)
        if not together <= {pattern for pattern, _ in kept}:
            return posed
        problem = posed.assembled.problem
        never = Edge(0, 1, np.full((len(problem.costs[0]), len(problem.costs[1])), np.inf))
        barred = replace(problem, edges=(*problem.edges, never))
        return Posed(posed.reading, replace(posed.assembled, problem=barred))

    return Refused(
        asked, Free(), pose(asked.pins, Free(), frozenset()), pose, lambda posed, choice: 0.0
    )


def test_pins_that_exclude_each_other_are_named(step: Traced) -> None:
    pins = tuple((pin, WHOLE) for pin in ("x", "params/a", "params/b"))
    error = impossible(step, frozenset({"params/a", "x"}), pins).error()
    assert isinstance(error, PinError)
    assert str(error).splitlines() == [
        "these cannot be kept together on (data=8):",
        "* pin 'x' = P(None, None)",
        "* pin 'params/a' = P(None, None)",
        "Drop any one of them.",
    ]


def test_where_dropping_pins_does_not_help_none_is_named(step: Traced) -> None:
    error = impossible(step, frozenset(), (("x", WHOLE),)).error()
    assert type(error) is InfeasibleError
    assert str(error) == "no sharding of this step is possible on (data=8)"
