"""A plan read from its file means the very programs that it was made with."""

from dataclasses import replace
from typing import Any

import jax
import pytest

import autopar
from autopar.errors import PlanError
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.plan_file import plan_from_json, plan_to_json
from autopar.schedule.planned import once_seconds_of, simulation_of
from tests.zoo import Case, cases

CASES = cases("adam")
WHOLE = [
    ("mlp", {"mesh": (2, 4)}),
    ("gpt", {"mesh": (2, 4), "method": "megatron"}),
    ("gpt_scan", {"mesh": (8,), "method": "fsdp"}),
    ("moe", {"mesh": (2, 4), "method": "expert"}),
]
STAGED = [
    ("masked", {"stages": 2, "microbatches": 4, "schedule": "gpipe"}),  # a count is hoisted
    ("mlp", {"stages": 2, "microbatches": 4, "schedule": "zb-h1"}),
    ("lstm_raw", {"microbatches": 4}),
]
TOWERS = ("clip", {"stages": 2, "microbatches": 4, "schedule": "zb-h1"})


def args_of(case: Case) -> tuple[Any, Any]:
    return jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0)


@pytest.mark.parametrize(("name", "options"), WHOLE, ids=[name for name, _ in WHOLE])
def test_one_program_comes_back(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    step = autopar.parallelize(case.step, cluster="8xcpu", **options)
    made = step.planned(*args_of(case))
    (listed,) = reopen(plan_from_json(plan_to_json(made.plan))).listings
    assert listed.graph == made.graph
    assert listed.listing == made.program.parts[0].listing
    assert [op.rule for op in listed.graph.walk()] == [op.rule for op in made.graph.walk()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(*staged, id=staged[0]) for staged in STAGED),
        pytest.param(*TOWERS, id=TOWERS[0], marks=pytest.mark.slow),
    ],
)
def test_stage_programs_come_back(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    step = autopar.parallelize(case.step, cluster="2x4xa100-40gb", **options)
    made = step.planned(*args_of(case))
    plan = plan_from_json(plan_to_json(made.plan))
    assert plan == made.plan
    parts = {p.part.name: p.listing for p in made.program.parts}
    assert {each.part: each.listing for each in reopen(plan).listings} == parts
    simulation, timing = simulation_of(plan), made.programs.timing
    assert timing.simulation is not None
    assert simulation.spans == timing.simulation.spans
    assert simulation.peak_bytes == timing.simulation.peak_bytes
    assert once_seconds_of(plan) == timing.once_seconds


def test_a_plan_that_keeps_no_step_says_so() -> None:
    case = CASES["mlp"]
    plan = autopar.plan(case.step, *args_of(case), cluster="8xcpu", mesh=(8,))
    with pytest.raises(PlanError, match="keeps no step"):
        reopen(replace(plan, record=None))
