"""Clusters drawn for a terminal: the catalog with its sources, and one cluster in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cluster import Cluster, Torus, axis_links, mesh_shapes
from autopar.ir.codec import Json
from autopar.ir.mesh import MeshShape
from autopar.ir.text import show_bytes, show_count, show_seconds
from autopar.report.calibration import calibration_data, calibration_tables
from autopar.report.style import ACCENT, BAD, GOOD, QUIET, facts, plain_table

_TRUST = {"high": GOOD, "medium": "yellow", "low": BAD}
_INNER_SIZES = (2, 4, 8, 16)  # what the last axis of a usual mesh holds


def usual_meshes(cluster: Cluster) -> tuple[MeshShape, ...]:
    """The mesh of one axis, and those of two whose last is 2 to 16 devices."""
    if cluster.device_count == 1:
        return ()
    shapes = mesh_shapes(cluster.device_count, 2)
    return tuple(s for s in shapes if len(s.sizes) == 1 or s.sizes[-1] in _INNER_SIZES)


def cluster_data(cluster: Cluster) -> dict[str, Json]:
    """A cluster's figures as one JSON object: bytes, seconds, FLOP/s."""
    chip, measured = cluster.chip, cluster.calibration
    return {
        "name": cluster.name,
        "chip": chip.name,
        "platform": chip.platform,
        "devices": cluster.device_count,
        "hosts": cluster.hosts,
        "memory_bytes": chip.memory_bytes,
        "memory_bytes_per_second": chip.memory_bytes_per_second,
        "peak_flops": dict(chip.peak_flops),
        "topology": str(cluster.topology),
        "link_bytes_per_second": _link_rate(cluster),
        "source": {
            "what": chip.source.what,
            "url": chip.source.url,
            "date": chip.source.date,
            "confidence": chip.source.confidence,
        },
        "calibration": calibration_data(cluster, measured) if measured else None,
    }


def mesh_data(cluster: Cluster) -> list[Json]:
    """Bandwidth and latency of each axis of the usual meshes."""
    return [
        {
            "mesh": dict(zip(mesh.names, mesh.sizes, strict=True)),
            "axis": axis,
            "size": mesh.size([axis]),
            "crosses": [level.name for level in axis_links(cluster, mesh, [axis])],
            "bytes_per_second": _rate(cluster, mesh, axis),
            "latency_seconds": _latency(cluster, mesh, axis),
        }
        for mesh in usual_meshes(cluster)
        for axis in mesh.names
    ]


def catalog(clusters: Sequence[Cluster]) -> RenderableType:
    """One line a cluster, with a number for the source of its figures."""
    table = plain_table(
        "", "cluster", ">devices", ">memory", ">bf16\nFLOP/s", ">memory\nB/s", ">link\nB/s",
        "trust", "from",
    )  # fmt: skip
    sources: dict[tuple[str, str], int] = {}
    for c in clusters:
        chip = c.chip
        number = sources.setdefault((chip.source.what, chip.source.date), len(sources) + 1)
        table.add_row(
            Text(c.name, style=ACCENT),
            str(c.device_count),
            show_bytes(chip.memory_bytes),
            show_count(chip.flops_for("bf16")),
            show_count(chip.memory_bytes_per_second),
            show_count(_link_rate(c)),
            Text(chip.source.confidence, style=_TRUST[chip.source.confidence]),
            f"[{number}]",
        )
    notes = Table.grid(padding=(0, 1))
    for (what, date), number in sources.items():
        notes.add_row(Text(f"[{number}]", style=QUIET), Text(f"{date}: {what}", style=QUIET))
    return Group(table, Text(), notes)


def detail(cluster: Cluster) -> RenderableType:
    """One cluster's figures, and what each axis of its usual meshes gets of its wires."""
    chip, source = cluster.chip, cluster.chip.source
    peaks = ", ".join(f"{dtype} {show_count(rate, 'FLOP/s')}" for dtype, rate in chip.peak_flops)
    bandwidth = show_count(chip.memory_bytes_per_second, "B/s")
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    pairs: list[tuple[str, str | Text]] = [
        ("devices", f"{cluster.device_count} x {chip.name} ({chip.platform}) on {hosts}"),
        ("peak", peaks),
        ("memory", f"{show_bytes(chip.memory_bytes)} usable a device, {bandwidth}"),
        ("topology", str(cluster.topology)),
        ("source", f"{source.what}. {source.url}".strip()),
        ("as of", f"{source.date}, confidence {source.confidence}"),
    ]
    title = Text.assemble(("cluster ", QUIET), (cluster.name, f"bold {ACCENT}"))
    parts: list[RenderableType] = [title, facts(pairs)]
    if meshes := usual_meshes(cluster):
        parts += [Text(), _mesh_table(cluster, meshes)]
    if cluster.calibration is not None:
        parts += [Text(), calibration_tables(cluster, cluster.calibration)]
    return Group(*parts)


def _mesh_table(cluster: Cluster, meshes: Sequence[MeshShape]) -> Table:
    table = plain_table(
        "Usual meshes", "mesh", "axis", ">size", "~crosses", ">bandwidth", ">latency"
    )
    for mesh in meshes:
        for i, axis in enumerate(mesh.names):
            crosses = " + ".join(
                f"{level.name} {level.size}{' ring' if level.wraps else ''}"
                for level in axis_links(cluster, mesh, [axis])
            )
            table.add_row(
                Text("" if i else str(mesh), style=ACCENT),
                axis,
                str(mesh.size([axis])),
                crosses,
                show_count(_rate(cluster, mesh, axis), "B/s"),
                show_seconds(_latency(cluster, mesh, axis)),
                end_section=i == len(mesh.names) - 1,
            )
    return table


def _rate(cluster: Cluster, mesh: MeshShape, axis: str) -> float:
    """One-way bytes a second of a device over the axis: its narrowest level's."""
    return min((level.bytes_per_second for level in axis_links(cluster, mesh, [axis])), default=0.0)


def _latency(cluster: Cluster, mesh: MeshShape, axis: str) -> float:
    """Seconds a step of a collective over the axis starts late by: its slowest level's."""
    return max((level.latency_seconds for level in axis_links(cluster, mesh, [axis])), default=0.0)


def _link_rate(cluster: Cluster) -> float:
    """One-way bytes a second of one torus link, or of a device into its innermost switch."""
    topology = cluster.topology
    if isinstance(topology, Torus):
        return topology.link_bytes_per_second
    return topology.levels[0].bytes_per_second
