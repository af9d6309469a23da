"""`autopar calibrate`: measures the devices that are here and writes their cluster's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.api import Cluster, keep_to_cpu
from autopar.calibrating.calibrate import Calibrated, calibrate
from autopar.calibrating.fitted import refitted
from autopar.calibrating.ladder import FULL, QUICK, Effort
from autopar.cli.console import err, out, print_json, print_warnings, told
from autopar.ir.text_file import CLUSTER, check_output, write_text
from autopar.report.clusters import cluster_data, detail


@click.command("calibrate")
@click.option(
    "--devices",
    default="",
    help="'4' (the first four), '0,2,3' (their ids) or 'cpu:8' (virtual). Default: all there are.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, as --cluster reads it.",
)
@click.option("--quick", is_flag=True, help="Fewer sizes and runs, smaller arrays.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help=f"How long to measure at most. Default: {FULL.seconds:.0f}, quick {QUICK.seconds:.0f}.",
)
@click.option(
    "--job",
    default="",
    help="Measure several hosts, one process on each: 'auto' (Slurm, MPI, TPU pods) or "
    "HOST:PORT,PROCESSES,NUMBER.",
)
@click.option(
    "--from",
    "measured",
    metavar="CLUSTER.toml",
    type=click.Path(path_type=Path),
    help="Measure nothing: fit again what this file carries.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the cluster as one JSON object.")
@told
def calibrate_command(
    devices: str,
    output: Path,
    quick: bool,
    seconds: float | None,
    job: str,
    measured: Path | None,
    as_json: bool,
) -> None:
    """Measure the devices that are here, and write a cluster with the figures fitted to it.

    Matmuls, passes over memory, tiny ops and every collective over the axes of meshes are timed
    at several sizes, on all devices at once; nothing else should run on them. Stopped before its
    end it writes nothing.
    """
    check_output(output, CLUSTER)
    effort = QUICK if quick else FULL
    effort = replace(effort, seconds=seconds) if seconds is not None else effort
    if measured is not None:
        keep_to_cpu()
        found = Calibrated(refitted(Cluster.from_toml(measured)))
    else:
        found = _measured(devices, effort, job)
    if not found.speaks:
        return
    write_text(found.cluster.to_toml(), output)
    print_warnings(list(found.notes))
    if as_json:
        print_json(cluster_data(found.cluster))
        return
    console = out()
    console.print(detail(found.cluster))
    console.print()
    console.print(f"saved to {output}", style="bright_black", markup=False, soft_wrap=True)


def _measured(devices: str, effort: Effort, job: str) -> Calibrated:
    console = err()
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("opening the devices", total=None)

        def show(done: int, total: int, doing: str) -> None:
            progress.update(task, completed=done, total=total, description=doing)

        return calibrate(devices, effort, show, job)
