"""Measured figures of a cluster drawn for a terminal: their bars, and how well they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cluster import Cluster, Level, Switch
from autopar.cluster.calibration import Calibration
from autopar.ir.codec import Json
from autopar.ir.text import show_count, show_seconds
from autopar.report.style import ACCENT, BAD, GOOD, percent, plain_table

_GOOD, _FAIR = 0.1, 0.3  # errors up to which a figure, or a kind of price, is well or fairly known
_LINEAR = 0.5  # beyond which an error is told as a factor either way


def figure_of(cluster: Cluster, name: str) -> float:
    """The figure that a bar of a calibration names."""
    room, _, field = name.rpartition(".")
    if room == "peak_flops":
        return dict(cluster.chip.peak_flops)[field]
    owner: object = cluster.chip if field in vars(cluster.chip) else cluster.topology
    for level in _levels(cluster):
        owner = level if level.name == room else owner
    return float(getattr(owner, field))


def _levels(cluster: Cluster) -> Sequence[Level]:
    topology = cluster.topology
    if isinstance(topology, Switch):
        return topology.levels
    return (topology.network,) if topology.network else ()


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
    table = plain_table("Measured figures", "figure", ">value", ">error")
    for bar in calibration.bars:
        table.add_row(
            Text(bar.figure, style=ACCENT),
            _shown(bar.figure, figure_of(cluster, bar.figure)),
            Text(show_error(bar.relative_error), style=_color(bar.relative_error)),
        )
    return table


def _shown(name: str, figure: float) -> str:
    if name.endswith("_seconds"):
        return show_seconds(figure)
    if name.startswith("peak_flops"):
        return show_count(figure, "FLOP/s")
    if name.endswith("bytes_per_second"):
        return show_count(figure, "B/s")
    return show_count(figure, "FLOP") if name.endswith("flops") else f"{figure:.3g}"


def _residuals(calibration: Calibration) -> Table:
    table = plain_table(
        "Prices against measurements", "kind", ">samples", ">median error", ">largest"
    )
    for residual in calibration.residuals:
        table.add_row(
            residual.kind,
            str(residual.samples),
            Text(percent(residual.median), style=_color(residual.median)),
            percent(residual.largest),
        )
    return table


def _color(error: float) -> str:
    return GOOD if error <= _GOOD else "yellow" if error <= _FAIR else BAD
