"""`autopar calibrate`: the cluster of the devices that are here, measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.api import Cluster, keep_to_cpu
from autopar.calibrating.calibrate import Calibrated, calibrate
from autopar.calibrating.fitted import refit
from autopar.calibrating.ladder import FULL, QUICK
from autopar.cli.console import out, print_json, print_warnings
from autopar.ir.text_file import CLUSTER, check_output, write_text
from autopar.report.clusters import cluster_data, detail


def calibrate_devices(
    devices: str,
    output: Path,
    quick: bool,
    seconds: float | None,
    job: str,
    measured: Path | None,
    as_json: bool,
) -> None:
    """Measure the devices that are here and write their cluster's file."""
    check_output(output, CLUSTER)
    effort = QUICK if quick else FULL
    effort = replace(effort, seconds=seconds) if seconds is not None else effort
    if measured is not None:
        keep_to_cpu()
        found = Calibrated(refit(Cluster.from_toml(measured)))
    else:
        found = calibrate(devices, effort, job)
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
