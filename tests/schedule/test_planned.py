"""The loop of a step in time, with what it takes to start its tasks."""

import pytest

from autopar.errors import ScheduleError
from autopar.schedule.planned import simulate_loop
from autopar.schedule.times import StageTimes

TIMES = StageTimes((2.0, 2.0), (3.0, 3.0), (4.0, 4.0))


@pytest.mark.parametrize(
    ("schedule", "tasks"),
    [
        ("1f1b", {"F": 2.5, "B": 7.5}),  # I and W are one task, which starts once
        ("zb-h1", {"F": 2.5, "I": 3.5, "W": 4.5}),
    ],
)
def test_every_task_takes_its_launch(schedule: str, tasks: dict[str, float]) -> None:
    loop = simulate_loop(schedule, 2, 4, TIMES, 0.5)
    spans = [span for row in loop.spans for span in row]
    assert {s.task.kind.value for s in spans} == set(tasks)
    for span in spans:
        took = span.end_seconds - span.start_seconds
        assert took == pytest.approx(tasks[span.task.kind.value])
    each = 4 * sum(tasks.values())
    assert loop.busy_seconds == pytest.approx((each, each))


def test_a_schedule_that_there_is_not_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called '%0'"):
        simulate_loop("%0", 2, 4, TIMES, 0.5)
