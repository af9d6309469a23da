"""Clusters for a terminal: the catalog with its sources, one in full, what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from autopar.cluster import Cluster, axis_links, mesh_shapes
from autopar.cluster.calibration import Calibration
from autopar.ir.codec import Json
from autopar.ir.sharding import MeshShape
from autopar.ir.text import show_bytes, show_count, show_seconds
from autopar.report.style import ACCENT, BAD, GOOD, QUIET, facts
from autopar.report.table import Cell, Table, percent

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
    """A table of clusters, each with a number for the source of its figures."""
    sources: dict[tuple[str, str], int] = {}
    rows: list[tuple[Cell, ...]] = []
    for c in clusters:
        chip = c.chip
        number = sources.setdefault((chip.source.what, chip.source.date), len(sources) + 1)
        rows.append((
            Text(c.name, style=ACCENT), str(c.device_count), show_bytes(chip.memory_bytes),
            show_count(chip.flops_for("bf16")), show_count(chip.memory_bytes_per_second),
            show_count(_link_rate(c)),
            Text(chip.source.confidence, style=_TRUST[chip.source.confidence]), f"[{number}]",
        ))  # fmt: skip
    columns = (
        "cluster", ">devices", ">memory", ">bf16\nFLOP/s", ">memory\nB/s", ">link\nB/s", "trust",
        "from",
    )  # fmt: skip
    table = Table("", columns, rows)
    notes = Grid.grid(padding=(0, 1))
    for (what, date), number in sources.items():
        notes.add_row(Text(f"[{number}]", style=QUIET), Text(f"{date}: {what}", style=QUIET))
    return Group(table, Text(), notes)


def detail(cluster: Cluster) -> RenderableType:
    """The figures of a cluster, and what each axis of its usual meshes gets of its wires."""
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
    rows: list[tuple[Cell, ...]] = []
    for mesh in meshes:
        if rows:
            rows.append(())
        for i, axis in enumerate(mesh.names):
            crosses = " + ".join(
                f"{level.name} {level.size}{' ring' if level.wraps else ''}"
                for level in axis_links(cluster, mesh, [axis])
            )
            rows.append((
                Text("" if i else str(mesh), style=ACCENT), axis, str(mesh.size([axis])), crosses,
                show_count(_rate(cluster, mesh, axis), "B/s"),
                show_seconds(_latency(cluster, mesh, axis)),
            ))  # fmt: skip
    columns = ("mesh", "axis", ">size", "~crosses", ">bandwidth", ">latency")
    return Table("Usual meshes", columns, rows)


def _rate(cluster: Cluster, mesh: MeshShape, axis: str) -> float:
    """Bytes a second, one way, of a device over the axis: its narrowest level's."""
    return min((level.bytes_per_second for level in axis_links(cluster, mesh, [axis])), default=0.0)


def _latency(cluster: Cluster, mesh: MeshShape, axis: str) -> float:
    """Seconds a step of a collective over the axis starts late by: its slowest level's."""
    return max((level.latency_seconds for level in axis_links(cluster, mesh, [axis])), default=0.0)


def _link_rate(cluster: Cluster) -> float:
    """Bytes a second, one way, of a link from chip to chip, else into the innermost switch."""
    direct, levels = cluster.topology.direct_link, cluster.topology.switch_levels
    return direct.bytes_per_second if direct else levels[0].bytes_per_second


# -- measured figures ------------------------------------------------------------------------------

_GOOD, _FAIR = 0.1, 0.3  # errors up to which a figure, or a kind of price, is well or fairly known
_LINEAR = 0.5  # beyond which an error is told as a factor either way


def figure_of(cluster: Cluster, name: str) -> float:
    """The figure that a bar of a calibration names."""
    room, _, field = name.rpartition(".")
    if room == "peak_flops":
        return dict(cluster.chip.peak_flops)[field]
    owner: object = cluster.chip if field in vars(cluster.chip) else cluster.topology
    for level in cluster.topology.switch_levels:
        owner = level if level.name == room else owner
    return float(getattr(owner, field))


def show_error(error: float) -> str:
    """The standard error of a logarithm: '±3.0%', or past a half '2.7-fold'."""
    return f"±{percent(error)}" if error < _LINEAR else f"{math.exp(error):.1f}-fold"


def calibration_data(cluster: Cluster, calibration: Calibration) -> dict[str, Json]:
    """The measured figures with their errors, and the residuals, as JSON."""
    return {
        "like": calibration.like,
        "jax": calibration.jax,
        "device_kind": calibration.device_kind,
        "samples": len(calibration.samples),
        "figures": {
            bar.figure: {
                "value": figure_of(cluster, bar.figure),
                "relative_error": bar.relative_error,
            }
            for bar in calibration.bars
        },
        "residuals": {
            r.kind: {"median": r.median, "largest": r.largest, "samples": r.samples}
            for r in calibration.residuals
        },
    }


def calibration_tables(cluster: Cluster, calibration: Calibration) -> RenderableType:
    """The measured figures, and how far the prices they give are from what was measured."""
    return Group(_figures(cluster, calibration), Text(), _residuals(calibration))


def _figures(cluster: Cluster, calibration: Calibration) -> Table:
    rows = [
        (
            Text(bar.figure, style=ACCENT), _shown(bar.figure, figure_of(cluster, bar.figure)),
            Text(show_error(bar.relative_error), style=_color(bar.relative_error)),
        )
        for bar in calibration.bars
    ]  # fmt: skip
    return Table("Measured figures", ("figure", ">value", ">error"), rows)


def _shown(name: str, figure: float) -> str:
    if name.endswith("_seconds"):
        return show_seconds(figure)
    if name.startswith("peak_flops"):
        return show_count(figure, "FLOP/s")
    if name.endswith("bytes_per_second"):
        return show_count(figure, "B/s")
    return show_count(figure, "FLOP") if name.endswith("flops") else f"{figure:.3g}"


def _residuals(calibration: Calibration) -> Table:
    rows = [
        (
            r.kind, str(r.samples), Text(percent(r.median), style=_color(r.median)),
            percent(r.largest),
        )
        for r in calibration.residuals
    ]  # fmt: skip
    columns = ("kind", ">samples", ">median error", ">largest")
    return Table("Prices against measurements", columns, rows)


def _color(error: float) -> str:
    return GOOD if error <= _GOOD else "yellow" if error <= _FAIR else BAD
