"""`autopar plan`: plans a step out of a file for a cluster that need not be there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from autopar import api, plans
from autopar.cli.console import err, gather_warnings, out, print_json, print_warnings
from autopar.cli.loading import Target, load_target, tracing
from autopar.cli.pins import load_pins, read_pins
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.codec import Json
from autopar.ir.layers import LayerSequence
from autopar.ir.plan import Plan
from autopar.ir.text_file import PLAN, check_output
from autopar.report.plan import collectives, headline, margins, parameters, pipeline
from autopar.report.rows import plan_data
from autopar.report.table import Table

Count = int | Literal["auto"]


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
    cache: Path | None
    no_cache: bool
    compare: str | None


@dataclass(frozen=True)
class Way:
    """A method that the plan is compared with: its plan, or why there is none."""

    method: str
    plan: Plan | None
    why_not: str = ""


@dataclass(frozen=True)
class Made:
    """A plan, how long it took, what was warned of, and the IR that was asked for."""

    planned: api.Planned
    seconds: float
    after_text: str
    warnings: tuple[str, ...]
    beside: tuple[Way, ...] = ()


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
        plans.save(made.planned.plan, output)
    print_warnings(list(made.warnings))
    if as_json:
        _print_data(made, output, after)
    elif after is not None:
        click.echo(made.after_text)
    else:
        _print(made, output)


def _make(loaded: Target, wanted: Wanted, after: str | None) -> Made:
    start = time.perf_counter()
    methods = [m.strip() for m in (wanted.compare or "").split(",") if m.strip()]
    step, others = _step(loaded, wanted, after), [_step(loaded, wanted, after, m) for m in methods]
    trail = Trail()
    with gather_warnings() as messages, tracing(loaded):
        planned: api.Planned = step.watched([trail.watcher], *loaded.args, **loaded.kwargs)
        beside = tuple(_way(m, o, loaded) for m, o in zip(methods, others, strict=True))
    seconds = time.perf_counter() - start
    text = trail.text_after(after, planned) if after is not None else ""
    return Made(planned, seconds, text, tuple(messages), beside)


def _step(
    loaded: Target, wanted: Wanted, after: str | None, method: str | None = None
) -> api.ParallelStep[..., Any]:
    of_file = load_pins(wanted.pins_file) if wanted.pins_file is not None else {}
    return api.parallelize(
        loaded.step,
        cluster=wanted.cluster,
        mesh=wanted.mesh,
        method=method or wanted.method,
        memory_gb=wanted.memory_gb,
        pins={**of_file, **read_pins(wanted.pins)},
        mesh_axes=wanted.mesh_axes,
        remat=False if wanted.no_remat else "auto",
        stages=wanted.stages,
        microbatches=wanted.microbatches,
        schedule=wanted.schedule,
        passes=wanted.passes,
        cache=_cache(wanted, after),
    )


def _way(method: str, step: api.ParallelStep[..., Any], loaded: Target) -> Way:
    try:
        return Way(method, step.plan_for(*loaded.args, **loaded.kwargs))
    except (InfeasibleError, MemoryLimitError) as error:
        return Way(method, None, str(error).splitlines()[0])


def _compared_rows(made: Made) -> list[dict[str, Json]]:
    """This plan and those of the other methods, by what each step should take and hold."""
    ours = made.planned.plan
    whole = ours.prediction.seconds
    rows: list[dict[str, Json]] = []
    for way in (Way(f"this plan ({ours.origin.method})", ours), *made.beside):
        p = way.plan.prediction if way.plan is not None else None
        rows.append({
            "method": way.method,
            "mesh": str(way.plan.mesh) if way.plan is not None else None,
            "seconds": p.seconds if p is not None else None,
            "more_share": p.seconds / whole - 1 if p is not None and whole > 0 else None,
            "peak_bytes": p.peak_bytes if p is not None else None,
            "mfu_share": p.mfu(p.seconds) if p is not None else None,
            "note": way.why_not,
        })  # fmt: skip
    return rows


def _compared(made: Made) -> Table:
    columns = {
        "method": "method", "mesh": "mesh", ">step": "seconds", ">more": "more_share",
        ">memory": "peak_bytes", ">MFU": "mfu_share", "~note": "note",
    }  # fmt: skip
    return Table.of("Methods by predicted seconds and memory", columns, _compared_rows(made))


def _cache(wanted: Wanted, after: str | None) -> Path | Literal[False] | None:
    """The plan cache to look in: none where the way to the plan is asked for."""
    return False if wanted.no_cache or after is not None else wanted.cache


def _print(made: Made, output: Path | None) -> None:
    console, plan = out(), made.planned.plan
    console.print(headline(plan, plans.inspect(plan).axes if plan.is_one_program else ()))
    console.print()
    if not plan.is_one_program:
        console.print(pipeline(plan, made.planned.programs.timing.simulation))
        console.print()
    if plan.outcome.recipes:
        console.print(margins(plan))
        console.print()
    if made.beside:
        console.print(_compared(made))
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
            **({"compared": list(_compared_rows(made))} if made.beside else {}),
            **({"after": after, "text": made.after_text} if after is not None else {}),
        }
    )


# -- the IR on the way ----------------------------------------------------------------------------


class Trail:
    """The layers that the planner cut on its way, and what each slot gave of the plan it made."""

    def __init__(self) -> None:
        self._layers: list[LayerSequence] = []

    @property
    def watcher(self) -> api.Watcher:
        """The watcher to hand to the planner."""
        return api.Watcher(after=self._after)

    def _after(self, slot: str, given: object, made: object, seconds: float) -> None:
        if isinstance(made, LayerSequence):
            self._layers.append(made)

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
