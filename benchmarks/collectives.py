"""Collective prices beside XLA's own: each kind by size over the groups of a GPU cluster.

`python -m benchmarks.collectives [--cluster 2x8xh100 ...]` compiles a program of one collective at
a time for GPUs that need not be there (`autopar[aot-gpu]`) and reads its latency from the dump of
the compiler's schedule; one JSON line a collective, then the worst of each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import Cluster, device_order
from autopar.cluster.target import Target
from autopar.cost import Prices
from autopar.hlo.clock import read_timeline
from autopar.ir.listing import COLLECTIVES
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot import child
from autopar.runtime.aot.devices import devices_of

MIB = 2**20
SIZES = (MIB // 16, MIB, 8 * MIB, 32 * MIB, 256 * MIB)
# (mesh, axes): within a host side by side and strided, over hosts, and between hosts alone.
_IN_A_HOST = (
    ("data=8", "data"), ("data=4,model=2", "model"), ("data=4,model=2", "data"),
    ("data=2,model=4", "model"), ("data=2,model=4", "data"),
)  # fmt: skip
GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "8xh100": _IN_A_HOST,
    "8xb200": _IN_A_HOST,
    "2x8xh100": (
        ("data=16", "data"), ("data=2,model=8", "model"), ("data=2,model=8", "data"),
        ("data=4,model=4", "data"), ("data=8,model=2", "data"),
    ),
    "4x8xh100": (
        ("data=32", "data"), ("data=4,model=8", "data"), ("data=8,model=4", "data"),
        ("data=2,model=16", "model"), ("data=2,model=16", "data"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """One collective over one axis of a mesh on a cluster; `nbytes` is the whole local buffer."""

    cluster: str
    mesh: MeshShape
    axis: str
    kind: str
    nbytes: int

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return self.mesh.size((self.axis,))


def probes(cluster: str, sizes: Sequence[int] = SIZES) -> Iterator[Probe]:
    """Every kind and size over the groups of a cluster."""
    for mesh, axis in GROUPS[cluster]:
        for kind in COLLECTIVES:
            yield from (Probe(cluster, MeshShape.of(mesh), axis, kind, n) for n in sizes)


def compiled_seconds(probe: Probe, devices: Sequence[Any]) -> float:
    """What XLA's scheduler takes the collective to last; `devices` as JAX numbers them."""
    cluster = Cluster.parse(probe.cluster)
    order = device_order(cluster, probe.mesh)
    grid = np.array([devices[i] for i in order], dtype=object).reshape(probe.mesh.sizes)
    mesh = Mesh(grid, probe.mesh.names)
    spec = PartitionSpec(probe.mesh.names)
    run = jax.shard_map(_body(probe), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    local = probe.nbytes // (probe.group_size if probe.kind == "all-gather" else 1)
    given = jax.ShapeDtypeStruct(
        (local // 2 * mesh.size,), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    with tempfile.TemporaryDirectory(prefix="autopar-probe-") as name:
        options = child.options_of(Target.of(cluster), (), Path(name))
        jax.jit(run).lower(given).compile(compiler_options=options)
        (dump,) = Path(name).glob("dump/*.schedule.txt")
        timeline = read_timeline(dump.read_text())
    # The start itself counts as a microsecond of work.
    return timeline.exposed_seconds + 1e-6 if timeline else math.nan


def _body(probe: Probe) -> Callable[[jax.Array], jax.Array]:
    """The collective on a device's own piece."""
    axis, n = probe.axis, probe.group_size
    ring = [(i, (i + 1) % n) for i in range(n)]
    bodies: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all-gather": lambda x: lax.all_gather(x, axis, tiled=True),
        "all-reduce": lambda x: lax.psum(x, axis),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axis, tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, axis, ring),
    }
    return bodies[probe.kind]


def compared(probe: Probe, devices: Sequence[Any]) -> dict[str, Any]:
    """Our seconds and XLA's for one probe, in microseconds."""
    prices = Prices(Cluster.parse(probe.cluster), probe.mesh)
    ours = prices.collective(probe.kind, probe.nbytes, (probe.axis,))
    theirs = compiled_seconds(probe, devices)
    return {
        "cluster": probe.cluster,
        "mesh": str(probe.mesh),
        "axis": probe.axis,
        "kind": probe.kind,
        "mib": probe.nbytes / MIB,
        "predicted_us": round(ours * 1e6, 2),
        "compiled_us": round(theirs * 1e6, 2),
        "ratio": round(ours / theirs, 3),
    }


def main() -> None:
    """All probes of the clusters asked for, then how far off each kind is at most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", nargs="*", default=sorted(GROUPS), choices=sorted(GROUPS))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    ratios: dict[str, list[float]] = {}
    for name in options.cluster:
        devices = devices_of(Target.of(Cluster.parse(name)))
        for probe in probes(name):
            row = compared(probe, devices)
            print(json.dumps(row), flush=True)
            if probe.nbytes >= MIB:
                ratios.setdefault(probe.kind, []).append(row["ratio"])
    for kind, found in ratios.items():
        print(json.dumps({"kind": kind, "least": min(found), "most": max(found)}))


if __name__ == "__main__":
    main()
