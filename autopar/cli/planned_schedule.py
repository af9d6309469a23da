"""The schedule of a saved plan, for `autopar schedule --plan`: drawn, as JSON, or as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from autopar import api
from autopar.cli.console import out, print_json
from autopar.errors import InputError
from autopar.ir.plan import Plan
from autopar.report.inspection_data import schedule_data
from autopar.report.pipeline import pipeline
from autopar.report.style import QUIET
from autopar.report.svg.gantt import gantt_svg
from autopar.report.svg.save import save_drawing
from autopar.report.trace import TracedSpan, load_trace
from autopar.schedule.planned import once_seconds_of, simulation_of


def draw_planned(path: Path, trace: Path | None, output: Path | None, as_json: bool) -> None:
    """Print a plan's schedule, and save its picture where an output is named.

    Raises InputError where the plan has no stages, or the trace is none of its steps.
    """
    plan = api.load(path)
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
    print_saved(output)


def print_saved(output: Path | None) -> None:
    """Say where the picture is, if there is one."""
    if output is not None:
        out().print(Text(f"\nsaved to {output}", style=QUIET), soft_wrap=True)


def _picture(plan: Plan, measured: tuple[TracedSpan, ...]) -> str:
    return gantt_svg(
        simulation_of(plan),
        once_seconds=once_seconds_of(plan),
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
