"""Free choice is never dearer than a recipe, whatever the model, cluster, mesh or memory limit."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import Status
from autopar.passes.base import Setting
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import RECIPES, recipe_named
from autopar.passes.shard.recipes.incumbent import (
    Incumbent,
    better_of,
    known_solution,
    recipe_incumbent,
    restrictions,
)
from autopar.passes.shard.solver.heuristic import first_choice, min_memory
from autopar.passes.shard.solver.solve import solve
from tests.passes.driving import Traced, assembled, setting, traced
from tests.zoo import cases

RESTRICTED = tuple(r for r in RECIPES if r != "auto")
CLUSTERS = ("8xh100", "8xa100-80gb", "8xcpu", "v5e:2x4")
MESHES = ("8", "2,4", "4,2", "2,2,2")
QUICK = ("mlp", "masked")
SHARES = (0.0, 0.02, 0.1, 0.4, 1.0)  # of the way from the least that fits to what is cheapest
ROUNDING = 1 + 2e-6


@functools.cache
def zoo(name: str) -> Traced:
    case = cases("adam")[name]
    return traced(case.step, case.create_state(jax.random.key(0)), case.batch(0))


@functools.cache
def limits(name: str, mesh: str, cluster: str) -> tuple[float, float]:
    """The least that the step can hold, and what its cheapest plan holds."""
    # Under a limit that nothing keeps, every byte is counted.
    problem = assembled(zoo(name).graph, setting(mesh, cluster, 1))[1].problem
    free = solve(replace(problem, limit_bytes=float("inf")))
    return min_memory(problem).nbytes, problem.peak_bytes(free.choice)


def limited(name: str, mesh: str, cluster: str, share: float) -> Setting:
    least, most = limits(name, mesh, cluster)
    return setting(mesh, cluster, int(least + share * max(0.0, most - least)) + 1)


def seconds(name: str, asked: Setting, method: str) -> float:
    """What a method's plan costs; infinity where it has none."""
    try:
        plan = Optimal(recipe=recipe_named(method)).run(zoo(name).graph, asked)
    except InfeasibleError:
        return float("inf")
    return plan.outcome.seconds


def never_dearer(name: str, mesh: str, cluster: str, share: float) -> None:
    asked = limited(name, mesh, cluster, share)
    free = seconds(name, asked, "auto")
    assert free < float("inf")  # what holds the least fits
    for method in RESTRICTED:
        assert free <= seconds(name, asked, method) * ROUNDING, method


QUIETLY = settings(derandomize=True, database=None)


@settings(QUIETLY, max_examples=2)
@given(*(st.sampled_from(s) for s in (QUICK, MESHES, CLUSTERS, SHARES)))
def test_free_choice_is_never_dearer(name: str, mesh: str, cluster: str, share: float) -> None:
    never_dearer(name, mesh, cluster, share)


@pytest.mark.slow
@settings(QUIETLY, max_examples=60)
@given(*(st.sampled_from(s) for s in (sorted(cases("adam")), MESHES, CLUSTERS, SHARES)))
def test_free_choice_is_never_dearer_on_any_model(
    name: str, mesh: str, cluster: str, share: float
) -> None:
    never_dearer(name, mesh, cluster, share)


# -- what is recorded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [pytest.param("8", marks=pytest.mark.ci), pytest.param("2,4", marks=pytest.mark.slow)],
)
def test_every_recipe_has_its_margin(mesh: str) -> None:
    asked = setting(mesh, "8xh100")
    outcome = Optimal().run(zoo("moe_switch").graph, asked).outcome
    assert [m.name for m in outcome.recipes] == list(RESTRICTED)
    for margin in outcome.recipes:
        own = seconds("moe_switch", asked, margin.name)
        if margin.seconds is None:
            assert own == float("inf"), margin
        else:
            assert own / ROUNDING <= margin.seconds <= own * 1.1, margin
            assert outcome.seconds <= margin.seconds * ROUNDING


def test_a_recipe_that_makes_no_sense_says_why() -> None:
    outcome = Optimal().run(zoo("mlp").graph, setting("8", "8xh100")).outcome
    notes = {m.name: m.note for m in outcome.recipes if m.seconds is None}
    assert notes["hsdp"].endswith("but the mesh (data=8) has only one")
    assert notes["expert"].endswith("but this step has none")
    assert notes["sequence"].endswith("but this step has none")


def test_a_recipe_that_does_not_fit_says_what_it_holds() -> None:
    outcome = Optimal().run(zoo("mlp").graph, limited("mlp", "8", "8xh100", 0.1)).outcome
    (dp,) = (m for m in outcome.recipes if m.name == "dp")
    assert dp.seconds is None
    assert dp.note.startswith("does not fit: needs at least ")


def test_a_recipe_by_itself_is_measured_against_nothing() -> None:
    plan = Optimal(recipe=recipe_named("dp")).run(zoo("mlp").graph, setting("8", "8xh100"))
    assert plan.outcome.recipes == ()


def test_recipes_keep_the_pins() -> None:
    """dp would leave the weights whole; pinned ones stay as they are pinned, in every recipe."""
    step, pin = zoo("mlp"), ("params/layer[01]/w", ((), ("data",)))
    asked = replace(setting("8", "8xh100"), pins=(pin,))
    reading, whole = assembled(step.graph, asked, asked.pins)
    choices = whole.choices[: len(reading.decisions)]
    floor = recipe_incumbent(whole, restrictions(reading, choices, asked.mesh))
    assert floor.choice
    for d, at in enumerate(floor.choice[: len(reading.decisions)]):
        if reading.decisions[d].fixed is not None:
            assert whole.choices[d][at] == Sharding(((), ("data",)))
    plan = Optimal(recipe=recipe_named("dp")).run(step.graph, asked)
    kernels = [i.value.name for i in step.graph.inputs if i.path.endswith("/w")]
    laid = [plan.sharding_of[k] for k in kernels]
    assert laid.count(Sharding(((), ("data",)))) >= 2


# -- the floor under the search --------------------------------------------------------------------


def test_a_search_that_does_worse_is_given_the_best_recipe() -> None:
    asked = setting("2,4", "8xh100")
    reading, whole = assembled(zoo("mlp").graph, asked)
    choices = whole.choices[: len(reading.decisions)]
    floor = recipe_incumbent(whole, restrictions(reading, choices, asked.mesh))
    poor = known_solution(whole.problem, tuple(len(c) - 1 for c in whole.choices), "Poor.")
    for found in (poor, known_solution(whole.problem, (), "None.")):
        answer = better_of(found, floor)
        assert answer.seconds == floor.seconds == whole.problem.seconds(answer.choice)
        assert whole.problem.fits(answer.choice)
        assert answer.bound_seconds <= answer.seconds
    best = solve(whole.problem)
    assert better_of(best, floor) == best
    assert better_of(best, Incumbent()) == best


def test_the_best_recipe_is_the_floor() -> None:
    asked = setting("2,4", "v5e:2x4")
    reading, whole = assembled(zoo("lstm_raw").graph, asked)
    choices = whole.choices[: len(reading.decisions)]
    floor = recipe_incumbent(whole, restrictions(reading, choices, asked.mesh))
    costs = [m.seconds for m in floor.margins if m.seconds is not None]
    assert floor.seconds == min(costs)
    assert all(m.note for m in floor.margins)


@pytest.mark.parametrize("share", SHARES)
def test_first_answers_fit(share: float) -> None:
    asked = limited("mlp", "2,4", "8xh100", share)
    problem = assembled(zoo("mlp").graph, asked)[1].problem
    choice = first_choice(problem)
    assert not choice or problem.fits(choice)
    if share == 1.0:
        best = solve(problem)
        assert best.status is Status.OPTIMAL
        assert best.seconds / ROUNDING <= problem.seconds(choice) <= best.seconds * 1.1


def test_a_limit_below_all_is_refused_by_all() -> None:
    least, _ = limits("mlp", "8", "8xh100")
    asked = setting("8", "8xh100", int(least * 0.9))
    for method in RECIPES:
        with pytest.raises((MemoryLimitError, InfeasibleError)):
            Optimal(recipe=recipe_named(method)).run(zoo("mlp").graph, asked)
