"""The simulator against a slow one, and against what no schedule can beat."""

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import simulate as module
from autopar.schedule.grid import Grid, Kind, Task
from autopar.schedule.simulate import Span, StageTimes, simulate
from autopar.schedule.table import make_grid
from autopar.schedule.times import even_times
from tests.schedule import brute_force
from tests.schedule.drawing import grids, stage_times


@settings(max_examples=150)
@given(st.data())
def test_it_agrees_with_the_slow_one(data: st.DataObject) -> None:
    grid = data.draw(grids(devices=5, microbatches=9))
    times = data.draw(stage_times(grid.stage_count))
    done, slow = simulate(grid, times), brute_force.spans(grid, times)
    found = {
        (s.task.kind.value, s.task.stage, s.task.microbatch): (s.start_seconds, s.end_seconds)
        for spans in done.spans
        for s in spans
    }
    assert found == slow
    assert done.makespan_seconds == max(end for _, end in slow.values())
    if grid.kinds != (Kind.FORWARD,):
        assert done.peak_in_flight == brute_force.peak_in_flight(grid, slow)
        assert done.peak_bytes == brute_force.peak_bytes(grid, times, slow)


@settings(max_examples=150)
@given(st.data())
def test_no_schedule_beats_its_work_or_its_longest_path(data: st.DataObject) -> None:
    grid = data.draw(grids())
    times = data.draw(stage_times(grid.stage_count))
    done = simulate(grid, times)
    work = [0.0] * grid.device_count
    for spans in done.spans:
        for span in spans:
            work[grid.device_of[span.task.stage]] += span.end_seconds - span.start_seconds
    assert done.busy_seconds == tuple(work)
    assert done.makespan_seconds >= max(max(work), _round_trip(grid, times))
    for whole, within in zip(done.makespan_bubbles, done.span_bubbles, strict=True):
        assert whole >= within >= 0
    for spans in done.spans:
        ends = [span.end_seconds for span in spans]
        assert all(s.start_seconds >= e for s, e in zip(spans[1:], ends, strict=False))


def _round_trip(grid: Grid, times: StageTimes) -> float:
    """One microbatch through all stages and back, with no device ever busy."""
    boundaries = [
        s for s in range(grid.stage_count - 1) if grid.device_of[s] != grid.device_of[s + 1]
    ]
    there = sum(times.forward) + sum(times.send_seconds[s] for s in boundaries)
    if grid.kinds == (Kind.FORWARD,):
        return there
    back = times.return_seconds or times.send_seconds
    home = sum(times.input_gradient) + sum(back[s] for s in boundaries)
    return there + home + times.weight_gradient[0]


@settings(max_examples=50)
@given(st.data())
def test_slower_parts_never_end_a_step_sooner(data: st.DataObject) -> None:
    grid = data.draw(grids())
    times, slower = (data.draw(stage_times(grid.stage_count)) for _ in range(2))
    assert simulate(grid, _slowest(times, slower)).makespan_seconds >= max(
        simulate(grid, each).makespan_seconds for each in (times, slower)
    )


def _slowest(a: StageTimes, b: StageTimes) -> StageTimes:
    return StageTimes(
        forward=tuple(map(max, a.forward, b.forward)),
        input_gradient=tuple(map(max, a.input_gradient, b.input_gradient)),
        weight_gradient=tuple(map(max, a.weight_gradient, b.weight_gradient)),
        send_seconds=tuple(map(max, a.send_seconds, b.send_seconds)),
        return_seconds=tuple(
            map(max, a.return_seconds or a.send_seconds, b.return_seconds or b.send_seconds)
        ),
    )


def test_machine_code_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make_grid("zb-v", 4, 9, 2)
    thirds = tuple((3 + s) / 7 for s in range(8))
    times = StageTimes(thirds, thirds[::-1], thirds, thirds[1:])
    plain = simulate(grid, times)
    monkeypatch.setattr(module, "_MANY_TASKS", 0)
    assert (simulate(grid, times).ends == plain.ends).all()


def test_a_simulation_prints() -> None:
    times = StageTimes(
        forward=(1.0, 1.0),
        input_gradient=(1.0, 1.0),
        weight_gradient=(1.0, 1.0),
        send_seconds=(0.5,),
        activation_bytes=(2048, 1024),
    )
    assert str(simulate(make_grid("1f1b", 2, 3), times)) == dedent("""\
        grid 1f1b  p=2 m=3 v=1  makespan 14 s  bubble 5 s, 5 s within a device's span
        device 0 | F0  F1  ··········· B0----- F2  B1----- ······· B2-----
        device 1 | ····· F0  B0----- F1  B1----- ··· F2  B2----- ·········
        in flight at most: 2, 1
        held at most: 4.00 KiB, 1.00 KiB""")


def test_a_boundary_within_a_device_takes_no_time() -> None:
    times = even_times(1, 2, forward=2.0, input_gradient=2.0, weight_gradient=2.0, latency=5.0)
    assert simulate(make_grid("zb-v", 1, 1, 2), times).makespan_seconds == 6.0


def test_forward_only_holds_nothing() -> None:
    times = StageTimes((1.0,), (0.0,), (0.0,), activation_bytes=(7,), kept_bytes=(3,))
    done = simulate(make_grid("forward-only", 1, 3), times)
    assert (done.peak_bytes, done.peak_in_flight) == ((0,), (0,))


def test_spans_are_of_tasks() -> None:
    done = simulate(make_grid("gpipe", 1, 1), StageTimes((1.0,), (2.0,), (0.5,)))
    assert done.spans == (
        (Span(Task(Kind.FORWARD, 0, 0), 0.0, 1.0), Span(Task(Kind.BACKWARD, 0, 0), 1.0, 3.5)),
    )


def test_costs_that_are_none_are_all_named() -> None:
    with pytest.raises(ScheduleError) as caught:
        StageTimes((1.0, -2.0), (1.0,), (1.0, 1.0), (float("nan"),), activation_bytes=(1,))
    assert str(caught.value) == (
        "times of 2 stages cannot be used: forward has -2.0, which is no cost; "
        "input_gradient has 1 costs, not 2; send_seconds has nan, which is no cost; "
        "activation_bytes has 1 costs, not 2"
    )


def test_times_of_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="gpipe has 2 stages, but the times are of 1"):
        simulate(make_grid("gpipe", 2, 1), StageTimes((1.0,), (1.0,), (1.0,)))


def test_a_grid_that_cannot_run_is_refused() -> None:
    backward, forward = Task(Kind.BACKWARD, 0, 0), Task(Kind.FORWARD, 0, 0)
    last = Task(Kind.FORWARD, 1, 0), Task(Kind.BACKWARD, 1, 0)
    stuck = Grid("mine", 1, (0, 1), ((backward, forward), last))
    with pytest.raises(ScheduleError, match=r"mine cannot run: nothing leads to B0\.0"):
        simulate(stuck, StageTimes((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))
