"""`autopar show`: prints a saved plan."""

from __future__ import annotations

from pathlib import Path

import click

from autopar import api
from autopar.cli.console import out, print_json, told
from autopar.report.memory import memory, memory_in_full
from autopar.report.pipeline import pipeline
from autopar.report.plan import collectives, headline, margins, parameters
from autopar.report.view import plan_data


@click.command("show")
@click.argument("path", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option("--params", is_flag=True, help="How every argument lies, and nothing else.")
@click.option("--comm", is_flag=True, help="The collectives, and nothing else.")
@click.option(
    "--memory",
    "with_memory",
    is_flag=True,
    help="What a device holds, when, and the largest values; nothing else.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def show_command(path: Path, params: bool, comm: bool, with_memory: bool, as_json: bool) -> None:
    """Print a saved plan: what it was made for, predicts, and decides."""
    plan = api.load(path)
    if as_json:
        print_json(plan_data(plan))
        return
    everything = not (params or comm or with_memory)
    parts = [headline(plan)] if everything else []
    if everything and plan.pipeline is not None:
        parts.append(pipeline(plan.pipeline))
    if everything and plan.outcome.recipes:
        parts.append(margins(plan))
    if comm or everything:
        parts.append(collectives(plan))
    if params or everything:
        parts.append(parameters(plan, shown=None) if params else parameters(plan))
    if with_memory or everything:
        parts.append(memory_in_full(plan) if with_memory else memory(plan))
    console = out()
    for i, part in enumerate(parts):
        if i:
            console.print()
        console.print(part)
