"""Every law of a grid is kept by what is made here, and missed where it is broken."""

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule.grid import Grid, Kind, Task
from autopar.schedule.table import SCHEDULES, in_flight
from tests.schedule.drawing import grids
from tests.schedule.laws import faults, plain_loop


def grid_of(device_of: tuple[int, ...], *rows: str) -> Grid:
    """Two microbatches in a grid written as text: F1.0 is a forward of stage 1."""

    def task(word: str) -> Task:
        stage, microbatch = word[1:].split(".")
        return Task(Kind(word[0]), int(stage), int(microbatch))

    return Grid("mine", 2, device_of, tuple(tuple(map(task, row.split())) for row in rows))


@settings(max_examples=300)
@given(grids(devices=8, microbatches=20))
def test_every_grid_obeys_the_laws_and_the_formula_of_its_peaks(grid: Grid) -> None:
    assert not faults(grid)
    numbers = (grid.device_count, grid.microbatches, grid.chunks)
    assert grid.peak_in_flight == in_flight(grid.name, *numbers)


@settings(max_examples=50)
@given(grids())
def test_every_grid_does_what_its_plain_loop_does(grid: Grid) -> None:
    loop = plain_loop(grid)
    assert not faults(loop)
    assert (loop.device_of, sorted(loop.tasks())) == (grid.device_of, sorted(grid.tasks()))
    held = SCHEDULES[grid.name].has_backward * grid.chunks
    assert loop.peak_in_flight == (held,) * grid.device_count


@settings(max_examples=150)
@given(st.data())
def test_two_tasks_that_change_places_are_noticed_if_they_must_not(data: st.DataObject) -> None:
    grid = data.draw(grids(devices=4, microbatches=8))
    device = data.draw(st.integers(0, grid.device_count - 1))
    row = list(grid.rows[device])
    at = data.draw(st.integers(0, len(row) - 1))
    same = [k for k, t in enumerate(row) if (t.kind, t.stage) == (row[at].kind, row[at].stage)]
    other = data.draw(st.sampled_from(same))
    row[at], row[other] = row[other], row[at]
    changed = Grid(
        "mine", grid.microbatches, grid.device_of,
        (*grid.rows[:device], tuple(row), *grid.rows[device + 1 :]),
    )  # fmt: skip
    assert bool(faults(changed)) == (at != other)


ONE_DEVICE = {
    "F0.0 B0.0 F0.1 B0.1 F0.1": [
        "F0.1 runs 2 times",
        "device 0 still keeps 1 of its forwards at the end",
    ],
    "F0.0 F0.1 B0.0": [
        "B0.1 does not run",
        "device 0 still keeps 1 of its forwards at the end",
    ],
    "B0.0 F0.0 F0.1 B0.1": [
        "B0.0 runs before F0.0, which it needs",
        "device 0 gives back at B0.0 what it does not keep",
    ],
    "F0.1 F0.0 B0.0 B0.1": ["stage 0 runs F0.1 before F0.0"],
    "F0.0 W0.0 I0.0 F0.1 I0.1 W0.1": ["W0.0 runs before I0.0, which it needs"],
    "F0.0 B0.0 F0.1 I0.1 W0.1": [
        "its tasks are of the kinds 'F B I W', not F, F and B, or F, I and W"
    ],
    "F0.0 I0.0 F0.1 I0.1": ["its tasks are of the kinds 'F I', not F, F and B, or F, I and W"],
    "F0.0 F3.1": ["F3.1 is of a stage that there is not, of 1"],
    "F0.0 F0.2": ["F0.2 is of a microbatch that there is not, of 2"],
}


@pytest.mark.smoke
@pytest.mark.parametrize("row", ONE_DEVICE)
def test_what_is_wrong_on_one_device(row: str) -> None:
    assert faults(grid_of((0,), row)) == ONE_DEVICE[row]


def test_a_stage_that_is_on_no_device() -> None:
    assert faults(grid_of((0, 5), "F0.0 F0.1")) == ["stage 1 is on device 5, of 1"]


def test_tasks_away_from_their_stage() -> None:
    grid = grid_of((0, 1), "F0.0 F0.1 F1.0", "F1.1")
    assert faults(grid) == ["F1.0 runs on device 0, but its stage is on device 1"]


def test_what_is_read_in_another_order_than_sent() -> None:
    grid = grid_of((0, 1), "F0.0 F0.1", "F1.1 F1.0")
    assert faults(grid) == [
        "stage 1 runs F1.1 before F1.0",
        "stage 0 sends F0.0 where stage 1 reads F0.1",
    ]


def test_devices_that_wait_for_each_other() -> None:
    grid = grid_of((0, 1), "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    assert faults(grid) == [
        "device 0 waits for ever: B0.0 reads B1.0, which never runs",
        "device 1 waits for ever: F1.1 reads F0.1, which never runs",
    ]
    assert str(grid) == dedent("""\
        grid mine  p=2 m=2 v=1
        device 0 | F0 B0 F1 B1
        device 1 | F0 F1 B0 B1""")
