"""`autopar clusters`: the catalog, or one cluster in full."""

from __future__ import annotations

import click

from autopar.api import Cluster, keep_to_cpu
from autopar.cli.completion import offered
from autopar.cli.console import out, print_json, told
from autopar.report.clusters import catalog, cluster_data, detail, mesh_data

# One usual size of each chip: any other of the same form does as well.
LISTED = (
    "8xcpu", "8xv100-16gb", "8xa100-40gb", "4x8xa100-40gb", "8xa100-80gb", "8xh100", "16x8xh100",
    "8xh200", "8xb200", "72xgb200", "v4:4x4x4", "v5e:4x4", "v5p:4x4x8", "v6e:16x16", "tpu7x:4x4x4",
)  # fmt: skip
_FORMS = (
    "Any size will do: 8xh100 (devices x chip), 4x8xa100-40gb (hosts x devices x chip), v5p:4x4x8 "
    "(TPU slice), 2xv5e:16x16 (slices), local, or a .toml file. autopar clusters NAME shows one."
)


@click.command("clusters")
@click.argument("name", required=False, shell_complete=offered(LISTED, or_files=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def clusters_command(name: str | None, as_json: bool) -> None:
    """List the known clusters, or show one (a name or a .toml file) with its usual meshes."""
    if name is not None:
        _one(name, as_json)
        return
    known = [Cluster.parse(listed) for listed in LISTED]
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
