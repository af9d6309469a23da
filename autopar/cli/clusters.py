"""`autopar clusters`: the catalog of clusters, and one of them in full."""

from __future__ import annotations

from autopar.cli.console import out, print_json
from autopar.cluster import Cluster
from autopar.cluster.catalog import usual_clusters
from autopar.report.clusters import catalog, cluster_data, detail, mesh_data

_FORMS = (
    "Any size will do: 8xh100 (devices x chip), 4x8xa100-40gb (hosts x devices x chip), v5p:4x4x8 "
    "(TPU slice), 2xv5e:16x16 (slices), local, or a .toml file. autopar clusters NAME shows one."
)


def show_clusters(name: str | None, as_json: bool) -> None:
    """Print the catalog, or one cluster in full."""
    if name is not None:
        cluster = Cluster.parse(name)
        if as_json:
            print_json({**cluster_data(cluster), "meshes": mesh_data(cluster)})
        else:
            out().print(detail(cluster))
        return
    known = [Cluster.parse(listed) for listed in usual_clusters()]
    if as_json:
        print_json({"clusters": [cluster_data(c) for c in known]})
        return
    console = out()
    console.print(catalog(known))
    console.print()
    console.print(_FORMS, style="bright_black", markup=False)
