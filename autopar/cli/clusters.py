"""`autopar clusters` and `calibrate`: the catalog of clusters, and one measured here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.api import Cluster, keep_to_cpu
from autopar.calibrating.calibrate import Calibrated, calibrate
from autopar.calibrating.fitted import refit
from autopar.calibrating.ladder import FULL, QUICK
from autopar.cli.console import out, print_json, print_warnings
from autopar.cluster.catalog import usual_clusters
from autopar.ir.text_file import CLUSTER, check_output, write_text
from autopar.report.clusters import catalog, cluster_data, detail, mesh_data

_FORMS = (
    "Any size will do: 8xh100 (devices x chip), 4x8xa100-40gb (hosts x devices x chip), v5p:4x4x8 "
    "(TPU slice), 2xv5e:16x16 (slices), local, or a .toml file. autopar clusters NAME shows one."
)


def show_clusters(name: str | None, as_json: bool) -> None:
    """Print the catalog, or one cluster in full."""
    if name is not None:
        _one(name, as_json)
        return
    known = [Cluster.parse(listed) for listed in usual_clusters()]
    if as_json:
        print_json({"clusters": [cluster_data(c) for c in known]})
        return
    console = out()
    console.print(catalog(known))
    console.print()
    console.print(_FORMS, style="bright_black", markup=False)


def _one(name: str, as_json: bool) -> None:
    if name.strip().lower() != "local":
        keep_to_cpu()
    cluster = Cluster.parse(name)
    if as_json:
        print_json({**cluster_data(cluster), "meshes": mesh_data(cluster)})
        return
    out().print(detail(cluster))


# -- calibrate -------------------------------------------------------------------------------------


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
