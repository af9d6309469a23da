"""Schedules drawn: boxes where the simulation says, few shapes however many tasks."""

import json

import pytest

from autopar.report.svg.gantt import gantt_svg
from autopar.report.trace import TracedSpan, read_trace
from autopar.runtime.timeline import MeasuredSpan, Timeline, chrome_trace
from autopar.schedule.simulate import Simulation, simulate
from autopar.schedule.table import make_grid
from autopar.schedule.times import StageTimes, even_times
from tests.report.svg.reading import Shape, boxes, element_count, read, said, titled

plain = "{:.6g}".format


def simulated(name: str, p: int, m: int, v: int = 1) -> Simulation:
    times = even_times(p, v, forward=1, input_gradient=1, weight_gradient=1)
    return simulate(make_grid(name, p, m, v), times)


def places(shapes: list[Shape]) -> list[tuple[float, float]]:
    """Where boxes start and how long they are, as shares of the lane."""
    return [(s.x, s.width) for s in shapes]


def test_boxes_are_where_the_simulation_has_them() -> None:
    """1f1b on two devices with two microbatches, worked by hand: F F . B B and . F B F B."""
    svg = gantt_svg(simulated("1f1b", 2, 2), show=plain)
    first, second = titled(svg, "waits where")
    unit = first.width / 9
    want = {
        first.y: [(0, 1), (1, 1), (4, 2), (7, 2)],
        second.y: [(1, 1), (2, 2), (4, 1), (5, 2)],
    }
    for y, tasks in want.items():
        got = [s for s in titled(svg, "of microbatch") if s.y == y]
        assert [s.x for s in got] == pytest.approx([first.x + unit * t for t, _ in tasks], abs=0.11)
        assert [s.width for s in got] == pytest.approx([unit * w for _, w in tasks], abs=0.11)
    assert titled(svg, "backward of microbatch 1, stage 0: 7 to 9 (2)")
    assert [w for w in said(svg) if w in "01"] != []


def test_the_bubble_is_the_simulations() -> None:
    done = simulated("zb-h1", 4, 8)
    svg = gantt_svg(done, show=plain)
    share = f"{done.makespan_bubble / done.makespan_seconds:.1%}"
    assert share == "11.1%"
    assert said(svg).count(share) == 4
    assert said(svg)[0] == "zb-h1 4 devices, 8 microbatches, step 27, bubble 11.1%"


def test_what_comes_once_follows_each_last_task_and_makes_the_step() -> None:
    svg = gantt_svg(simulated("1f1b", 2, 2), once_seconds=(1.0, 3.0), show=plain)
    first, second = titled(svg, "once a step")
    assert "(1)" in first.title
    assert "7 to 10 (3)" in second.title
    # Device 0 ends its last task at 9 and its update at 10, as device 1 does.
    assert first.x + first.width == pytest.approx(second.x + second.width, abs=0.11)
    assert "bubble 30.0%" in said(svg)[0]


def test_microbatches_in_flight_and_their_bytes_are_told() -> None:
    times = StageTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, activation_bytes=(2**20,) * 4)
    svg = gantt_svg(simulate(make_grid("1f1b", 4, 8), times))
    for device, peak in enumerate((4, 3, 2, 1)):
        assert f"{peak}.00 MiB" in said(svg)
        (strip,) = [s for s in read(svg) if s.title == f"at most {peak}"]
        heights = [float(v.split("H")[0].rstrip("z")) for v in strip.d.split("V")[1:]]
        assert max(heights) - min(heights) == pytest.approx(2 * peak, abs=0.11), device


def test_many_tasks_are_a_path_a_colour() -> None:
    svg = gantt_svg(simulated("zb-h1", 16, 64), show=plain)
    paths = [s for s in read(svg) if s.name == "path" and s.css in ("c1", "c2", "c3")]
    assert len(paths) == 3 * 16
    assert all(len(boxes(path.d)) == 64 for path in paths)


@pytest.mark.parametrize(("p", "m"), [(64, 512), (8, 512), (16, 64), (64, 8), (256, 32)])
def test_few_shapes_however_many_tasks(p: int, m: int) -> None:
    svg = gantt_svg(simulated("1f1b", p, m), show=plain)
    assert element_count(svg) <= 5_000
    assert len(svg) <= 300_000


def test_columns_of_hairlines_are_as_tall_as_their_share_of_work() -> None:
    """Steady 1f1b: a third of a column is forward, all of it is work."""
    svg = gantt_svg(simulated("1f1b", 8, 512), show=plain)
    lane, *_ = titled(svg, "waits where")
    forward = next(s for s in read(svg) if s.name == "path" and s.css == "c1")
    levels = [float(part.split("H")[0].rstrip("z")) for part in forward.d.split("V")[1:]]
    steady = lane.y + lane.height * 2 / 3
    assert min(abs(level - steady) for level in levels) < 0.06
    assert len(levels) < 20  # the steady part is one step


def test_names_are_escaped() -> None:
    svg = gantt_svg(simulated("1f1b", 2, 2), names=["<a & b>", '"c"'])
    assert {"<a & b>", '"c"'} <= set(said(svg))
    assert "2 submeshes" in said(svg)[0]


def test_the_same_schedule_gives_the_same_bytes() -> None:
    first, second = (gantt_svg(simulated("zb-v", 4, 8, 2), standalone=True) for _ in range(2))
    assert first == second


def traced() -> tuple[TracedSpan, ...]:
    """Two submeshes with one microbatch, as a step's trace is written and read."""
    timeline = Timeline(
        2,
        (
            MeasuredSpan(0, "setup0", "setup", 0, -1, 0.5, 1.0),
            MeasuredSpan(0, "F0", "F", 0, 0, 1.0, 2.0),
            MeasuredSpan(0, "B0", "B", 0, 0, 5.0, 7.0),
            MeasuredSpan(1, "F1", "F", 1, 0, 3.0, 4.0),
            MeasuredSpan(1, "B1", "B", 1, 0, 4.0, 5.0),
            MeasuredSpan(0, "send to mesh1", "send", -1, 0, 2.0, 3.0, 1),
        ),
    )
    return read_trace(json.dumps(chrome_trace(timeline)), "t.json")


def test_measured_lanes_lie_under_the_predicted_on_one_axis() -> None:
    svg = gantt_svg(
        simulated("1f1b", 2, 1), measured=traced(), names=["mesh0", "mesh1"], show=plain
    )
    assert said(svg)[0] == (
        "1f1b 2 submeshes, 1 microbatch, step 6, bubble 50.0%; measured 6.5, bubble 69.2%"
    )
    predicted, measured = (titled(svg, f"{name} waits")[0] for name in ("mesh0", "measured"))
    assert measured.y > predicted.y
    # The predicted step is 6 s from the first forward on, the measured one 6 and 0.5 s of setup.
    unit = predicted.width / 6
    assert measured.width == pytest.approx(6.5 * unit, abs=0.2)
    forwards = [s for s in titled(svg, "forward of microbatch 0, stage 0")]
    assert forwards[0].x == forwards[1].x
    (setup,) = titled(svg, "setup0")
    assert setup.x == measured.x
    assert setup.width == pytest.approx(0.5 * unit, abs=0.11)
