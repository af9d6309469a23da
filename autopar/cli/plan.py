"""`autopar plan`: plans a step out of a file for a cluster that need not be there.

With `--fallbacks 1 -o plans` for a host fewer as well, before one is lost:

    plans/4-hosts.json   the cluster that was asked for
    plans/3-hosts.json   what is left of it

`parallelize(step, plan="plans")` takes the plan for the hosts that are there, and solves nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from autopar import api, plans
from autopar.cli.console import err, gather_warnings, out, print_json, print_warnings
from autopar.cli.loading import Target, load_target, tracing
from autopar.cli.pins import load_pins, read_pins
from autopar.cluster import Cluster
from autopar.cluster.placement import with_fewer_hosts
from autopar.cluster.planned import planned_cluster
from autopar.errors import (
    BatchError,
    InfeasibleError,
    InputError,
    MemoryLimitError,
    MeshError,
)
from autopar.ir.codec import Json
from autopar.ir.compiler_options import OptionValue
from autopar.ir.plan import Plan
from autopar.ir.stages import LayerSequence
from autopar.ir.text_file import PLAN, check_output
from autopar.ir.verification import verification_data
from autopar.report.plan import collectives, headline, margins, parameters, pipeline
from autopar.report.rows import plan_data
from autopar.report.table import Table
from autopar.verifying.confirmed_fit import ConfirmedFit

Count = int | Literal["auto"]


@dataclass(frozen=True)
class Wanted:
    """The options of the command: what to plan for, and how."""

    cluster: str | Cluster
    mesh: str | None
    mesh_axes: int
    method: str
    memory_gb: float | None
    no_remat: bool
    pins: tuple[str, ...]
    pins_file: Path | None
    compiler_options: tuple[str, ...]
    stages: Count
    microbatches: Count | None
    schedule: str
    passes: str | None
    cache: Path | None
    no_cache: bool
    compare: str | None
    fallbacks: int
    confirm_fit: bool


@dataclass(frozen=True)
class Way:
    """A method that the plan is compared with: its plan, or why there is none."""

    method: str
    plan: Plan | None
    why_not: str = ""


@dataclass(frozen=True)
class Fallback:
    """A plan for fewer hosts, or why there is none; `left_open` is what the planner had to choose.

    The batch is that of the whole cluster: microbatches take up what no longer fits at a time.
    """

    hosts: int
    plan: Plan | None
    left_open: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Made:
    """A plan, how long it took, what was warned of, and the IR that was asked for."""

    planned: api.Planned
    seconds: float
    after_text: str
    warnings: tuple[str, ...]
    beside: tuple[Way, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    confirmed: ConfirmedFit | None = None


def plan_step(
    target: str, wanted: Wanted, output: Path | None, after: str | None, as_json: bool
) -> None:
    """Plan the step of a file and print the plan, or what the slot `after` gave on the way."""
    if output is not None:
        _check_output(output, wanted.fallbacks)
    if wanted.confirm_fit and wanted.fallbacks:
        raise InputError(
            "--confirm-fit confirms one plan: plan with it for each number of hosts, in place of "
            "--fallbacks"
        )
    api.keep_to_cpu()
    with err().status("reading the file"):
        loaded = load_target(target)
    made = _make(loaded, wanted, after)
    if output is not None:
        _save(made, output)
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
        confirmed = None
        if wanted.confirm_fit:
            confirmed = step.confirm_fit(*loaded.args, **loaded.kwargs)
            planned = confirmed.planned
        beside = tuple(_way(m, o, loaded) for m, o in zip(methods, others, strict=True))
        fallbacks = tuple(_fallbacks(loaded, wanted, after))
    seconds = time.perf_counter() - start
    text = trail.text_after(after, planned) if after is not None else ""
    return Made(planned, seconds, text, tuple(messages), beside, fallbacks, confirmed)


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
        compiler_options=dict(map(_read_option, wanted.compiler_options)),
        mesh_axes=wanted.mesh_axes,
        remat=False if wanted.no_remat else "auto",
        stages=wanted.stages,
        microbatches=wanted.microbatches,
        schedule=wanted.schedule,
        passes=wanted.passes,
        # The way to a plan is only in a plan that is made now.
        cache=False if wanted.no_cache or after is not None else wanted.cache,
    )


def _read_option(text: str) -> tuple[str, OptionValue]:
    """An option of XLA as its flags are written: true and false, whole numbers, else texts."""
    name, is_one, value = text.partition("=")
    if not is_one:
        raise InputError(
            f"--compiler-option {text!a} is no NAME=VALUE; write xla_gpu_autotune_level=0"
        )
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if re.fullmatch(r"-?[0-9]{1,19}", value) else value


def _way(method: str, step: api.ParallelStep[..., Any], loaded: Target) -> Way:
    try:
        return Way(method, step.plan_for(*loaded.args, **loaded.kwargs))
    except (InfeasibleError, MemoryLimitError) as error:
        return Way(method, None, str(error).splitlines()[0])


def _fallbacks(loaded: Target, wanted: Wanted, after: str | None) -> Iterator[Fallback]:
    """A plan for each number of hosts from one fewer on.

    Where there is none as it was asked for, more and more is left to the planner: the mesh, then
    the number of microbatches, then the stages.
    """
    cluster = Cluster.parse(wanted.cluster)
    clusters = [with_fewer_hosts(cluster, n + 1) for n in range(wanted.fallbacks)]
    searched = replace(wanted, mesh=None)
    cut = replace(searched, microbatches="auto")
    turns = {"": wanted, "mesh": searched}
    if wanted.passes is None:  # which say the rest
        turns |= {"microbatches": cut, "stages": replace(cut, stages="auto")}
    for smaller in clusters:
        tried: list[Wanted] = []
        why_not = ""
        for left_open, options in turns.items():
            if options in tried:
                continue
            tried.append(options)
            step = _step(loaded, replace(options, cluster=smaller), after)
            try:
                plan = step.plan_for(*loaded.args, **loaded.kwargs)
            except (InfeasibleError, BatchError, MeshError) as error:
                why_not = why_not or str(error).splitlines()[0]
            else:
                yield Fallback(smaller.hosts, plan, left_open)
                break
        else:
            yield Fallback(smaller.hosts, None, "", why_not)


def _fallback_rows(made: Made) -> list[dict[str, Json]]:
    """The plans for all numbers of hosts, by what each step should take and hold."""
    ours = made.planned.plan
    rows: list[dict[str, Json]] = []
    for found in (Fallback(_hosts(ours), ours), *made.fallbacks):
        plan = found.plan
        row: dict[str, Json] = dict.fromkeys(
            ("devices", "mesh", "microbatches", "seconds", "more_share", "peak_bytes")
        )
        row |= {"hosts": found.hosts, "note": found.why_not}
        if plan is not None:
            p, many = plan.prediction, len(plan.stages)
            row |= {
                "devices": plan.device_count,
                "mesh": f"{many} stages" if many > 1 else str(plan.submeshes[0].mesh),
                "microbatches": plan.microbatches,
                "seconds": p.seconds,
                "more_share": p.seconds / ours.prediction.seconds - 1,
                "peak_bytes": p.peak_bytes,
                "note": f"{found.left_open} left to the planner" if found.left_open else "",
            }
        rows.append(row)
    return rows


def _fallback_table(made: Made) -> Table:
    columns = {
        ">hosts": "hosts", ">devices": "devices", "mesh": "mesh", ">microbatches": "microbatches",
        ">step": "seconds", ">more": "more_share", ">memory": "peak_bytes", "~note": "note",
    }  # fmt: skip
    return Table.of("Plans by the hosts that are left", columns, _fallback_rows(made))


def _hosts(plan: Plan) -> int:
    return planned_cluster(plan).hosts


def _check_output(output: Path, fallbacks: int) -> None:
    """Raise InputError where the plan, or a folder of plans, could not be written there."""
    if not fallbacks:
        check_output(output, PLAN)
        return
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{output} cannot be a folder for the plans of several numbers of hosts: "
            f"{error.strerror}"
        ) from None
    check_output(output / "1-hosts.json", PLAN)


def _save(made: Made, output: Path) -> None:
    """Write the plan, or each plan under its number of hosts."""
    plan = made.planned.plan
    if not made.fallbacks:
        plans.save(plan, output)
        return
    for found in (Fallback(_hosts(plan), plan), *made.fallbacks):
        if found.plan is not None:
            plans.save(found.plan, output / f"{found.hosts}-hosts.json")


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


def _confirmed(found: ConfirmedFit) -> Table:
    columns = {
        ">within": "limit_bytes", ">planned": "predicted_bytes", ">compiled": "compiled_bytes",
        ">step": "seconds",
    }  # fmt: skip
    compilers = dict.fromkeys(part.compiled.compiler for part in found.verification.parts)
    title = f"Memory of a device as {', '.join(compilers)} lays it out; the last plan fits"
    return Table.of(title, columns, found.rows())


def _print(made: Made, output: Path | None) -> None:
    console, plan = out(), made.planned.plan
    axes = plans.inspect(plan, ("axes",)).axes if plan.is_one_program else ()
    console.print(headline(plan, axes))
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
    if made.fallbacks:
        console.print(_fallback_table(made))
        console.print()
    if made.confirmed is not None:
        console.print(_confirmed(made.confirmed))
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
            **({"fallbacks": list(_fallback_rows(made))} if made.fallbacks else {}),
            **({"confirmed": _confirmed_data(made.confirmed)} if made.confirmed else {}),
            **({"after": after, "text": made.after_text} if after is not None else {}),
        }
    )


def _confirmed_data(found: ConfirmedFit) -> dict[str, Json]:
    return {"trials": list(found.rows()), "verification": verification_data(found.verification)}


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
