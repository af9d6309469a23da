"""Where stages are allowed and not asked for, one program is planned if it may be the faster."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

import autopar
from autopar.ir.graph import Graph
from autopar.planner import plan as planner
from autopar.planner.sliced_step import Source
from autopar.planner.stage_search import FoundStages, search_stages
from tests.zoo import cases

CASE = cases("sgd")["mlp"]
ARGS = (jax.eval_shape(CASE.create_state, jax.random.key(0)), CASE.batch(0))


def planned(**options: Any) -> autopar.Plan:
    given: dict[str, Any] = {"cluster": "2x4xv100", "cache": False, **options}
    return autopar.parallelize(CASE.step, **given).plan_for(*ARGS)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[FoundStages]:
    """What the search over stages found, for a step that counts as deep."""
    found: list[FoundStages] = []

    def search(source: Source, *rest: Any) -> FoundStages | None:
        stages = search_stages(source, *rest)
        if stages is not None:
            found.append(stages)
        return stages

    def deep(graph: Graph) -> bool:
        del graph
        return False

    monkeypatch.setattr(planner, "is_small", deep)
    monkeypatch.setattr(planner, "search_stages", search)
    return found


def test_one_program_of_a_deep_step_may_be_the_faster(searched: list[FoundStages]) -> None:
    alone = planned()
    either = planned(stages="auto", microbatches="auto")
    (stages,) = searched
    assert stages.programs.timing.seconds > alone.prediction.seconds  # what the search settles on
    assert stages.least_whole_seconds < alone.prediction.seconds  # the bound is one
    assert either.prediction.seconds == alone.prediction.seconds


def test_one_program_is_not_planned_where_its_layers_do_not_fit(
    searched: list[FoundStages], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: object) -> object:
        raise AssertionError(f"one program was planned: {given}")

    monkeypatch.setattr(planner, "_plan_one_program", never)
    monkeypatch.setattr("autopar.planner.stage_search.peak_bytes", lambda *_: math.inf)
    plan = planned(stages="auto", microbatches="auto")
    (stages,) = searched
    assert stages.least_whole_seconds == math.inf
    assert plan.prediction.seconds == stages.programs.timing.seconds
