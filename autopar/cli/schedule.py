"""`autopar schedule`: a pipeline schedule drawn in time, its bubbles and what it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autopar.cli.console import out, print_json, print_warnings
from autopar.errors import InputError, ScheduleError
from autopar.ir.codec import Json
from autopar.ir.plan import Plan
from autopar.ir.plan_file import load_plan
from autopar.report.plan import pipeline
from autopar.report.rows import schedule_data
from autopar.report.schedule import Drawing, legend
from autopar.report.style import ACCENT, QUIET, facts
from autopar.report.svg.gantt import gantt_svg
from autopar.report.svg.save import save_drawing
from autopar.report.table import percent
from autopar.report.trace import TracedSpan, load_trace
from autopar.schedule.grid import Kind
from autopar.schedule.planned import once_seconds_of, simulation_of
from autopar.schedule.simulate import Simulation, simulate
from autopar.schedule.table import Schedule, make_grid, schedule_named
from autopar.schedule.times import even_times

Costs = dict[str, float]

_EXAMPLE = "write --times F=1,I=1,W=1, or F=1,B=2 for schedules that do not split the backward"
_MOST_TASKS = 1_000_000
_LONGEST_TIME = 1e30
_MOST_LINES = 60


@dataclass(frozen=True)
class Asked:
    """A schedule by its name, simulated with the times that were given."""

    schedule: Schedule
    done: Simulation
    costs: Costs
    latency: float


def draw_schedule(
    name: str,
    sizes: tuple[int, int, int | None],
    times: str,
    latency: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Print a schedule by its name; `sizes` are devices, microbatches and, if given, chunks."""
    asked = _asked(name, sizes, times, latency)
    if output is not None:
        save_drawing(gantt_svg(asked.done, show="{:.6g}".format, standalone=True), output)
    if as_json:
        print_json(_data(asked.done, asked.costs, asked.latency))
        return
    costs = ", ".join(f"{kind} {cost:g}" for kind, cost in asked.costs.items())
    given = f"{costs} a device; {asked.latency:g} a transfer"
    _draw(out(), asked.schedule, asked.done, given)
    _print_saved(output)


def draw_plan(path: Path, trace: Path | None, output: Path | None, as_json: bool) -> None:
    """Print a plan's schedule, and save its picture where an output is named.

    Raises InputError where the plan has no stages, or the trace is none of its steps.
    """
    plan = load_plan(path)
    if plan.is_one_program:
        raise InputError(f"{path} is one program and has no schedule: autopar show {path}")
    if output is None and trace is not None:
        raise InputError("--trace is drawn in the picture: add -o NAME.svg or NAME.png")
    if output is not None:
        save_drawing(_picture(plan, _spans(trace, len(plan.submeshes))), output)
    if as_json:
        print_json(schedule_data(simulation_of(plan)))
        return
    out().print(pipeline(plan, simulation_of(plan)))
    _print_saved(output)


def _print_saved(output: Path | None) -> None:
    """Say where the picture is, if there is one."""
    if output is not None:
        out().print(Text(f"\nsaved to {output}", style=QUIET), soft_wrap=True)


def _picture(plan: Plan, measured: tuple[TracedSpan, ...]) -> str:
    return gantt_svg(
        simulation_of(plan),
        once_seconds=once_seconds_of(plan),
        step_seconds=plan.prediction.seconds,
        measured=measured,
        names=[f"mesh{number}" for number in range(len(plan.submeshes))],
        standalone=True,
    )


def _spans(trace: Path | None, submeshes: int) -> tuple[TracedSpan, ...]:
    if trace is None:
        return ()
    spans = load_trace(trace)
    traced = 1 + max(span.submesh for span in spans)
    if traced != submeshes:
        raise InputError(f"{trace} is of {traced} submeshes and the plan has {submeshes}")
    return spans


def _asked(name: str, sizes: tuple[int, int, int | None], times: str, latency: str) -> Asked:
    """The schedule in time; `sizes` are devices, microbatches and, if given, chunks."""
    schedule = schedule_named(name)
    costs, delay = _read_times(times, schedule), _time(latency, "latency")
    stages, microbatches, chunks = sizes
    v = schedule.usual_chunks if chunks is None else chunks
    if 3 * stages * microbatches * v > _MOST_TASKS:
        raise ScheduleError(
            f"{stages} stages x {microbatches} microbatches x {v} chunks are too many tasks; "
            "take fewer: once the pipeline is full, more microbatches leave the bubble as it is"
        )
    grid = make_grid(name, stages, microbatches, v)
    seconds = even_times(
        stages,
        v,
        forward=costs["F"],
        input_gradient=costs["B"] if "B" in costs else costs["I"],
        weight_gradient=0.0 if "B" in costs else costs["W"],
        latency=delay,
    )
    return Asked(schedule, simulate(grid, seconds), costs, delay)


def _read_times(text: str, schedule: Schedule) -> Costs:
    """Times by kind, as in F=1,B=2; what is left out takes 1."""
    costs: Costs = {}
    for part in text.split(","):
        kind, _, number = (word.strip() for word in part.partition("="))
        if kind not in tuple(Kind):
            raise ScheduleError(f"times {text!r}: {kind!r} is no kind of task; {_EXAMPLE}")
        if kind in costs:
            raise ScheduleError(f"times {text!r}: {kind} is there twice; {_EXAMPLE}")
        costs[kind] = _time(number, f"times {text!r}")
    if "B" in costs and (schedule.needs_split or "I" in costs or "W" in costs):
        why = f"{schedule.name} splits B" if schedule.needs_split else "B is I and W together"
        raise ScheduleError(f"times {text!r}: {why}; {_EXAMPLE}")
    usual = ("F",) if "B" in costs else ("F", "I", "W")
    return {**dict.fromkeys(usual, 1.0), **costs}


def _time(text: str, where: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time <= _LONGEST_TIME:
        raise ScheduleError(f"{where}: {text!r} is no time; write a number from 0 on")
    return time


def _data(done: Simulation, costs: Costs, latency: float) -> dict[str, Json]:
    """The schedule in time as one JSON object, in the unit of the times given."""
    digits = 12 - math.ceil(math.log10(done.makespan_seconds or 1.0))
    return {
        "schedule": done.grid.name,
        "stages": done.grid.device_count,
        "microbatches": done.grid.microbatches,
        "chunks": done.grid.chunks,
        "times": dict(costs),
        "latency": latency,
        "makespan": round(done.makespan_seconds, digits),
        "makespan_bubble": round(done.makespan_bubble, digits),
        "span_bubble": round(done.span_bubble, digits),
        "peak_in_flight": list(done.peak_in_flight),
        "devices": [
            [
                {
                    "task": str(span.task),
                    "kind": span.task.kind.value,
                    "stage": span.task.stage,
                    "microbatch": span.task.microbatch,
                    "start": round(span.start_seconds, digits),
                    "end": round(span.end_seconds, digits),
                }
                for span in spans
            ]
            for spans in done.spans
        ],
    }


def _draw(console: Console, schedule: Schedule, done: Simulation, times: str) -> None:
    grid = done.grid
    console.print(Text.assemble(("schedule ", QUIET), (grid.name, f"bold {ACCENT}")))
    console.print(schedule.sentence, style=QUIET)
    console.print()
    console.print(Drawing(done.picture, _MOST_LINES, unabridged=": --json has it all"), crop=False)
    console.print(legend(grid.kinds, grid.chunks))
    console.print()
    console.print(facts(_facts(done, times)))
    fewest = schedule.filling(grid.device_count)
    if grid.microbatches < fewest:
        words = f"{grid.device_count} devices are kept busy only from {fewest} microbatches on"
        print_warnings([f"{grid.name}: {words}"])


def _facts(done: Simulation, times: str) -> list[tuple[str, str | Text]]:
    grid = done.grid
    whole = done.makespan_seconds or 1.0
    bubble, span_bubble = f"{done.makespan_bubble:.6g}", f"{done.span_bubble:.6g}"
    share = percent(done.makespan_bubble / whole)
    devices = _count(grid.device_count, "device")
    microbatches = _count(grid.microbatches, "microbatch")
    pairs: list[tuple[str, str | Text]] = [
        ("pipeline", f"{devices}, {microbatches}"),
        ("times", times),
        ("makespan", f"{done.makespan_seconds:.6g}"),
        ("bubble", f"{bubble} ({share} of the makespan) in which a device does not work"),
        ("span bubble", f"{span_bubble} of it between the device's first and last task"),
    ]
    if grid.kinds != (Kind.FORWARD,):
        peaks = " ".join(map(str, done.peak_in_flight))
        what = "chunks of microbatches" if grid.chunks > 1 else "microbatches"
        pairs.append(
            ("in flight", f"at most {peaks}, by device: {what} that wait for their backward")
        )
    if grid.chunks > 1:
        held = (
            f"{device}: {' '.join(str(s) for s, d in enumerate(grid.device_of) if d == device)}"
            for device in range(grid.device_count)
        )
        pairs.insert(1, ("stages", f"by device, {', '.join(held)}"))
    return pairs


def _count(count: int, noun: str) -> str:
    plural = noun if count == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {plural}"
