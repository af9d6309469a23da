"""A pipeline drawn for a terminal and as JSON: what each stage runs, where, when, how long."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.codec import Json
from autopar.ir.pipeline import PipelinePlan, PlannedStage
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.listing import Cell, Listing
from autopar.report.schedule import Drawing, in_clock, legend
from autopar.report.style import QUIET, percent
from autopar.schedule.simulate import Simulation

_MOST_LINES = 24
_COLUMNS = (
    "forward, backward: one microbatch · once: gradient reductions and update, at the end of a "
    "step · memory: the peak of one device"
)


def pipeline(plan: PipelinePlan, simulation: Simulation | None = None) -> RenderableType:
    """The stages of a plan, and with its simulation the schedule that runs them, in time."""
    parts: list[RenderableType] = [_stages(plan), *_notes(plan)]
    if simulation is not None and len(plan.submeshes) > 1:
        grid = simulation.grid
        picture, clock = in_clock(simulation.picture)
        parts += ["", Drawing(picture, _MOST_LINES, clock), legend(grid.kinds, grid.chunks)]
    return Group(*parts)


def _stages(plan: PipelinePlan) -> Listing:
    uneven = len({s.mesh for s in plan.submeshes}) > 1  # else the headline has said it
    rows: list[tuple[Cell, ...]] = []
    for number, stage in enumerate(plan.stages):
        mesh = f" {plan.mesh_of(stage.submesh)}" if uneven else ""
        rows.append(
            (
                f"S{number}",
                stage.name or "all",
                str(stage.layers),
                Text.assemble(f"mesh{stage.submesh}", (mesh, QUIET)),
                show_seconds(stage.forward_seconds),
                show_seconds(stage.backward_seconds),
                show_seconds(stage.once_seconds),
                show_bytes(stage.peak_bytes),
            )
        )
    columns = (
        "stage", "/modules", ">layers", "submesh", ">forward", ">backward", ">once", ">memory"
    )  # fmt: skip
    return Listing(_title(plan), columns, rows, lead=4)


def _title(plan: PipelinePlan) -> str:
    batch = f"{plan.microbatches} microbatches of {plan.batch // plan.microbatches} rows"
    if len(plan.submeshes) == 1:
        return f"One stage: {batch}, one after the other"
    share = plan.bubble_seconds / plan.outcome.seconds if plan.outcome.seconds > 0 else 0.0
    bubble = f"bubble {show_seconds(plan.bubble_seconds)} ({percent(share)})"
    return f"Stages under {plan.schedule}: {batch}, {bubble}"


def _notes(plan: PipelinePlan) -> Iterator[Text]:
    yield Text(_COLUMNS, style=QUIET)
    again = [f"S{i}" for i, stage in enumerate(plan.stages) if stage.recompute]
    if again:
        yield Text(f"{', '.join(again)}: the forward is computed again for the backward")
    for note in plan.notes:
        yield Text(f"microbatches: {note}", style=QUIET)


def pipeline_data(plan: PipelinePlan) -> Json:
    """The same as JSON; seconds and bytes."""
    return {
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "batch": plan.batch,
        "bubble_seconds": plan.bubble_seconds,
        "peak_in_flight": list(plan.peak_in_flight),
        "submeshes": [
            {"mesh": dict(zip(s.mesh.names, s.mesh.sizes, strict=True)), "devices": list(s.devices)}
            for s in plan.submeshes
        ],
        "stages": [_stage_data(s) for s in plan.stages],
        "notes": list(plan.notes),
    }


def _stage_data(stage: PlannedStage) -> Json:
    return {
        "modules": stage.name,
        "layers": stage.layers,
        "submesh": stage.submesh,
        "recompute": stage.recompute,
        "forward_seconds": stage.forward_seconds,
        "input_gradient_seconds": stage.input_gradient_seconds,
        "weight_gradient_seconds": stage.weight_gradient_seconds,
        "backward_seconds": stage.backward_seconds,
        "once_seconds": stage.once_seconds,
        "peak_bytes": stage.peak_bytes,
    }
