"""A step of stages takes no less than its busiest host needs to issue all that it has to."""

from __future__ import annotations

import pytest

import autopar
from autopar.cost.prices import INSTRUCTION_SECONDS
from autopar.ir.program import Run, Send
from autopar.planner.planned import Planned
from tests.planner.layers import arguments, train_step

LAYERS, STAGES, MICROBATCHES = 8, 4, 8


def _planned(width: int, cluster: str) -> Planned:
    step = autopar.parallelize(
        train_step, cluster=cluster, stages=STAGES, microbatches=MICROBATCHES, schedule="1f1b"
    )
    return step.planned(*arguments(LAYERS, width, 8 * width))


def test_many_small_programs_wait_for_their_host() -> None:
    found = _planned(64, "4xh100")
    plan, timing = found.plan, found.programs.timing
    issued = [s for s in found.program.instructions if isinstance(s, Run | Send)]
    assert plan.prediction.seconds == pytest.approx(INSTRUCTION_SECONDS * len(issued))
    assert plan.prediction.seconds > 2 * timing.device_seconds
    assert plan.outcome.bound_seconds == plan.outcome.seconds == plan.prediction.seconds
    assert "to issue all programs and transfers" in str(plan.outcome)
    # The device that waits longest waits for the host, too.
    waits = plan.prediction.seconds - min(timing.busy_seconds)
    assert plan.prediction.bubble_seconds == pytest.approx(waits)


def test_hosts_issue_side_by_side() -> None:
    one, four = (_planned(64, c).programs.timing.issue_seconds for c in ("4xh100", "4x1xh100"))
    assert four < one / 2


def test_large_programs_wait_for_nobody() -> None:
    found = _planned(4096, "4xh100")
    assert found.plan.prediction.seconds == found.programs.timing.device_seconds
    assert "to issue" not in str(found.plan.outcome)
