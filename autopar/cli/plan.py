"""`autopar plan`: plans a step out of a file for a cluster that need not be there."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autopar import api
from autopar.cli.console import err, gather_warnings, out, print_json, print_warnings
from autopar.cli.loading import Target, load_target, tracing
from autopar.cli.pins import load_pins, read_pins
from autopar.ir.layers import LayerSequence
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import StagePlan
from autopar.ir.text import show_seconds
from autopar.ir.text_file import PLAN, check_output
from autopar.report.plan import collectives, headline, margins, parameters, pipeline
from autopar.report.rows import plan_data

Count = int | Literal["auto"]
_SLOTS = ("batch", "layer", "stage", "shard", "lower")


@dataclass(frozen=True)
class Wanted:
    """The options of the command: what to plan for, and how."""

    cluster: str
    mesh: str | None
    mesh_axes: int
    method: str
    memory_gb: float | None
    no_remat: bool
    pins: tuple[str, ...]
    pins_file: Path | None
    stages: Count
    microbatches: Count | None
    schedule: str
    passes: str | None


@dataclass(frozen=True)
class Made:
    """A plan, how long it took, what was warned of, and the IR that was asked for."""

    planned: api.Planned
    seconds: float
    after_text: str
    warnings: tuple[str, ...]


def plan_step(
    target: str, wanted: Wanted, output: Path | None, after: str | None, as_json: bool
) -> None:
    """Plan the step of a file and print the plan, or what the slot `after` gave on the way."""
    if output is not None:
        check_output(output, PLAN)
    api.keep_to_cpu()
    with err().status("reading the file"):
        loaded = load_target(target)
    made = _make(loaded, wanted, after)
    if output is not None:
        api.save(made.planned.plan, output)
    print_warnings(list(made.warnings))
    if as_json:
        _print_data(made, output, after)
    elif after is not None:
        click.echo(made.after_text)
    else:
        _print(made, output)


def _make(loaded: Target, wanted: Wanted, after: str | None) -> Made:
    start = time.perf_counter()
    of_file = load_pins(wanted.pins_file) if wanted.pins_file is not None else {}
    step = api.parallelize(
        loaded.step,
        cluster=wanted.cluster,
        mesh=wanted.mesh,
        method=wanted.method,
        memory_gb=wanted.memory_gb,
        pins={**of_file, **read_pins(wanted.pins)},
        mesh_axes=wanted.mesh_axes,
        remat=False if wanted.no_remat else "auto",
        stages=wanted.stages,
        microbatches=wanted.microbatches,
        schedule=wanted.schedule,
        passes=wanted.passes,
    )
    with gather_warnings() as messages, watch_planning(err()) as trail, tracing(loaded):
        planned: api.Planned = step.watched([trail.watcher], *loaded.args, **loaded.kwargs)
    seconds = time.perf_counter() - start
    text = trail.text_after(after, planned) if after is not None else ""
    return Made(planned, seconds, text, tuple(messages))


def _print(made: Made, output: Path | None) -> None:
    console, plan = out(), made.planned.plan
    console.print(headline(plan))
    console.print()
    if not plan.is_one_program:
        console.print(pipeline(plan, made.planned.programs.timing.simulation))
        console.print()
    if plan.outcome.recipes:
        console.print(margins(plan))
        console.print()
    console.print(collectives(plan))
    console.print()
    console.print(parameters(plan))
    console.print()
    saved = f", saved to {output}" if output is not None else ""
    console.print(f"planned in {made.seconds:.1f} s{saved}", style="bright_black", markup=False)
    console.print(f"passes {made.planned.request.passes}", style="bright_black", markup=False)


def _print_data(made: Made, output: Path | None, after: str | None) -> None:
    print_json(
        {
            **plan_data(made.planned.plan),
            "passes": str(made.planned.request.passes),
            "planning_seconds": round(made.seconds, 3),
            "output": str(output) if output is not None else None,
            "warnings": list(made.warnings),
            **({"after": after, "text": made.after_text} if after is not None else {}),
        }
    )


# -- following the planner ------------------------------------------------------------------------


class Trail:
    """The results of every slot on every mesh, and a progress line that follows them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("tracing", total=None)
        self._mesh: MeshShape | None = None
        self._layers: list[LayerSequence] = []

    @property
    def watcher(self) -> api.Watcher:
        """The watcher to hand to the planner."""
        return api.Watcher(after=self._after)

    def text_after(self, slot: str, planned: api.Planned) -> str:
        """The printed result of a slot on the way to the plan that was made."""
        made, placed = planned.programs, planned.programs.placed
        one, layers = planned.plan.is_one_program, placed.stages.layers
        if slot == "layer":  # as they were before those of a stage were merged
            found = (s for s in reversed(self._layers) if s.graph is layers.graph)
            return str(next(found, layers))
        if slot == "shard" and not one:
            return "\n".join(f"mesh{k}: {plan}" for k, plan in enumerate(made.shardings))
        texts = {
            "graph": planned.graph,
            "batch": placed.batching,
            "stage": placed.stages,
            "shard": made.shardings[0],
            "lower": made.program.parts[0].listing if one else made.program,
        }
        return str(texts[slot])

    def _after(self, slot: str, given: object, made: object, seconds: float) -> None:
        if slot == "mesh":
            self._progress.update(self._task, description=f"planning: mesh {given} tried")
        if slot not in _SLOTS:
            return  # a part of a slot, or what came before them
        if slot == _SLOTS[0]:
            self._mesh = None
        if isinstance(made, StagePlan):
            self._mesh = made.submeshes[0].mesh
        if isinstance(made, LayerSequence):
            self._layers.append(made)
        if isinstance(made, ShardingPlan) and self._mesh is not None:  # of a whole step
            self._print_mesh(made, seconds)
        done = _SLOTS.index(slot)
        following = _SLOTS[(done + 1) % len(_SLOTS)]
        where = f" on ({self._mesh})" if self._mesh is not None else ""
        self._progress.update(self._task, description=f"planning{where}: {following}")

    def _print_mesh(self, made: ShardingPlan, seconds: float) -> None:
        if self._progress.console.is_terminal:
            took, costs = show_seconds(seconds), show_seconds(made.outcome.seconds)
            line = f"mesh ({made.mesh}): {costs} a step, found in {took}"
            self._progress.console.print(line, style="bright_black")


@contextmanager
def watch_planning(console: Console) -> Generator[Trail]:
    """A spinner on the console while a plan is made; it vanishes when the plan is there."""
    shown = console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        yield Trail(progress)
