"""The schedules by name, and what is said of numbers that do not fit them."""

import pytest

from autopar.errors import ScheduleError
from autopar.schedule.grid import Kind, Task
from autopar.schedule.table import SCHEDULES, finest_schedule, make_grid, stage_devices

REFUSED = {
    ("zbh1", 4, 8, 1): "no schedule is called 'zbh1'. Close: zb-h1, zb-h2. Schedules: "
    + ", ".join(SCHEDULES),
    ("gpipe", 0, 3, 1): "gpipe on 0 devices with 3 microbatches: take at least one of each",
    ("gpipe", 2, -1, 1): "gpipe on 2 devices with -1 microbatches: take at least one of each",
    ("zb-v", 4, 8, 1): "zb-v needs 2 chunks a device, not 1",
    ("zb-v", 4, 8, 3): "zb-v needs 2 chunks a device, not 3",
    ("1f1b", 4, 8, 2): "1f1b has 1 chunk a device (more chunks: interleaved, looped-bfs, zb-v, "
    "zb-interleaved), not 2",
    ("serial", 4, 8, 0): "serial needs at least 1 chunk a device, not 0",
    (
        "interleaved",
        4,
        9,
        2,
    ): "interleaved on 4 devices: 9 microbatches do not make 2 equal groups; "
    "take 8 or 10 microbatches, or one chunk",
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_does_not_fit_is_refused(case: tuple[str, int, int, int]) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_grid(*case)
    assert str(caught.value) == REFUSED[case]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_grid_has_the_tasks_that_the_table_says(name: str) -> None:
    schedule = SCHEDULES[name]
    grid = make_grid(name, 3, 6, schedule.usual_chunks)
    assert grid.splits_backward == schedule.needs_split
    assert (len(grid.kinds) > 1) == schedule.has_backward
    assert grid.device_of == stage_devices(name, 3, schedule.usual_chunks)
    assert grid.chunks == schedule.usual_chunks


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.has_backward])
def test_a_barrier_between_all_forwards_and_all_backwards(name: str) -> None:
    schedule = SCHEDULES[name]
    grid = make_grid(name, 3, 6, schedule.usual_chunks)
    forwards = grid.microbatches * grid.chunks
    first = {task.kind for row in grid.rows for task in row[:forwards]}
    assert (first == {Kind.FORWARD}) == schedule.allows_barrier


def test_a_step_is_taken_apart_by_the_schedule_with_the_most_tasks() -> None:
    assert finest_schedule(barrier=False).name == "zb-h1"
    assert finest_schedule(barrier=True).name == "gpipe"


def test_plain_loops_are_told_from_schedules_that_overlap() -> None:
    assert [s.name for s in SCHEDULES.values() if s.is_plain_loop] == ["serial", "serial-split"]


def test_placements() -> None:
    assert stage_devices("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_devices("zb-v", 3, 2) == (0, 1, 2, 2, 1, 0)


def test_tasks_print_and_have_an_order() -> None:
    backward, forward = Task(Kind.BACKWARD, 2, 0), Task(Kind.FORWARD, 2, 10)
    assert (str(backward), str(forward)) == ("B2.0", "F2.10")
    assert sorted([forward, backward]) == [backward, forward]
