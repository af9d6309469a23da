"""Asking what other pins and limits would give: the same answers as planning anew, nothing lost."""

from typing import Any

import jax
import pytest

import autopar
from autopar.errors import MemoryLimitError, PinError, PlanError
from autopar.ir.plan import Argument
from tests.zoo import cases

CLUSTER = "8xh100"


def parallel(**options: Any) -> autopar.ParallelStep[..., Any]:
    case = cases("adam")["mlp"]
    step = autopar.parallelize(case.step, cluster=CLUSTER, mesh=(2, 4), **options)
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    step.plan_for(state, case.batch(0))
    return step


def largest(plan: autopar.Plan) -> Argument:
    state = [a for a in plan.arguments if a.role == "state"]
    return max(state, key=lambda a: (len(a.shape), a.shape, a.path))


def test_a_pin_gives_what_planning_with_it_gives() -> None:
    step = parallel()
    before = step.plan
    path = largest(before).path
    asked = step.what_if(pins={path: (None, "model")})
    anew = parallel(pins={path: (None, "model")}).plan
    assert asked == anew
    assert asked.origin.pins == ((path, ((), ("model",))),)
    assert step.plan is before


def test_pins_are_not_kept_from_one_question_to_the_next() -> None:
    step = parallel()
    path = largest(step.plan).path
    step.what_if(pins={path: (None, "model")})
    assert step.what_if() == step.plan


def test_another_limit() -> None:
    step = parallel()
    tight = 0.8 * step.plan.prediction.peak_bytes
    asked = step.what_if(memory_gb=tight / 2**30)
    assert asked.prediction.peak_bytes <= tight
    assert asked.prediction.seconds >= step.plan.prediction.seconds
    with pytest.raises(MemoryLimitError, match="a limit of"):
        step.what_if(memory_gb=1e-9)


def test_wrong_questions() -> None:
    step = parallel()
    with pytest.raises(PinError, match="matches none"):
        step.what_if(pins={"no/such/path": (None,)})
    case = cases("adam")["mlp"]
    with pytest.raises(PlanError, match="no plan yet"):
        autopar.parallelize(case.step, cluster=CLUSTER).what_if()


def test_a_loaded_plan_answers_too() -> None:
    step = parallel()
    case = cases("adam")["mlp"]
    loaded = autopar.parallelize(case.step, plan=step.plan)
    loaded.plan_for(jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0))
    path = largest(step.plan).path
    assert loaded.what_if(pins={path: (None, "model")}) == step.what_if(
        pins={path: (None, "model")}
    )
