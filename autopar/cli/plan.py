"""`autopar plan`: plans a step out of a file for a cluster that need not be there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from autopar import api
from autopar.cli.clusters import LISTED
from autopar.cli.completion import files, offered
from autopar.cli.console import (
    err,
    gathered_warnings,
    out,
    print_json,
    print_warnings,
    told,
)
from autopar.cli.loading import Target, last_line_in, load_target
from autopar.cli.pins import Dims, load_pins, read_pins
from autopar.cli.planning import Trail, watched_planning
from autopar.cli.stages import Count, stage_options
from autopar.errors import TraceError
from autopar.ir.text_file import PLAN, check_output
from autopar.report.pipeline import pipeline
from autopar.report.plan import collectives, headline, margins, parameters
from autopar.report.view import plan_data

METHODS = (
    "auto", "dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence", "fsdp+tp", "expert",
)  # fmt: skip
method_option = click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="The whole search, or a textbook recipe.",
)
AFTER = ("graph", "batch", "layer", "stage", "shard", "lower")


@dataclass(frozen=True)
class Wanted:
    """What to plan for, as the options say it."""

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


@dataclass(frozen=True)
class Made:
    """A plan, how long it took, what was warned of, and the IR that was asked for."""

    planned: api.Planned
    seconds: float
    after_text: str
    warnings: tuple[str, ...]


@click.command("plan")
@click.argument("target", metavar="FILE.py:FUNCTION", shell_complete=files)
@click.option(
    "--cluster",
    required=True,
    help="A name such as 8xh100 or v5p:4x4x4, or a .toml file.",
    shell_complete=offered(LISTED, or_files=True),
)
@click.option("--mesh", help="Sizes or named sizes: 2,4 or data=2,model=4. Default: searched.")
@click.option(
    "--mesh-axes",
    type=click.IntRange(1, 3),
    default=2,
    show_default=True,
    help="The most axes of a searched mesh.",
)
@method_option
@stage_options
@click.option("--memory-gb", type=float, help="GiB that one device may hold. Default: all it has.")
@click.option(
    "--no-remat", is_flag=True, help="Never recompute forward values, even where memory binds."
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="PATTERN=P(...)",
    help="Fix a sharding, as in 'params/**/kernel=P(None,\"model\")'; may be repeated.",
)
@click.option(
    "--pins",
    "pins_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of pins, as `autopar import` writes them; --pin counts before it.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Save the plan there, to be loaded with no solving.",
)
@click.option("--after", type=click.Choice(AFTER), help="Print the IR after this slot instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def plan_command(
    target: str, output: Path | None, after: str | None, as_json: bool, **options: object
) -> None:
    """Plan a step for a cluster; no device of it is needed.

    The file's example_args() returns the tuple of arguments that the step is called with, as
    arrays or as jax.ShapeDtypeStruct.
    """
    wanted = Wanted(**options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
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
    step: api.ParallelStep = api.parallelize(
        loaded.step,
        cluster=wanted.cluster,
        mesh=wanted.mesh,
        method=wanted.method,
        memory_gb=wanted.memory_gb,
        pins=_pins(wanted),
        mesh_axes=wanted.mesh_axes,
        remat=False if wanted.no_remat else "auto",
        stages=wanted.stages,
        microbatches=wanted.microbatches,
        schedule=wanted.schedule,
    )
    with gathered_warnings() as messages, watched_planning(err()) as trail:
        planned = _planned(step, loaded, trail)
    seconds = time.perf_counter() - start
    text = trail.text_after(after, planned) if after is not None else ""
    return Made(planned, seconds, text, tuple(messages))


def _pins(wanted: Wanted) -> dict[str, Dims]:
    """Both kinds of pins; one given by hand takes the place of a file's for the same pattern."""
    held = load_pins(wanted.pins_file) if wanted.pins_file is not None else {}
    return {**held, **read_pins(wanted.pins)}


def _planned(step: api.ParallelStep, loaded: Target, trail: Trail) -> api.Planned:
    try:
        return step.planned(*loaded.args, watchers=[trail.watcher], **loaded.kwargs)
    except TraceError as error:
        where = last_line_in(error.__cause__ or error, loaded.path.resolve())
        if not where:
            raise
        raise TraceError(f"{error}\n  {loaded.path}, {where}") from error


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


def _print_data(made: Made, output: Path | None, after: str | None) -> None:
    print_json(
        {
            **plan_data(made.planned.plan),
            "planning_seconds": round(made.seconds, 3),
            "output": str(output) if output is not None else None,
            "warnings": list(made.warnings),
            **({"after": after, "text": made.after_text} if after is not None else {}),
        }
    )
