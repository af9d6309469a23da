"""From measurements to the cluster that planning uses, the same for the same measurements.

A chip's figures are fitted to how long matmuls, passes over memory and tiny ops took on it, and
those of its links to how long collectives over the axes of meshes took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any

from autopar.calibrating.least_squares import FIRM, fit, significant
from autopar.cluster import (
    AbstractTopology,
    Chip,
    Cluster,
    LinkLevel,
    Source,
    SwitchLevel,
    axis_links,
)
from autopar.cluster.calibration import Bar, Calibration, Experiment, Residual, Sample, as_series
from autopar.cluster.chip import Confidence
from autopar.cost import collective_seconds, compute_seconds, elementwise_seconds
from autopar.errors import ClusterError
from autopar.ir.listing import COLLECTIVES
from autopar.ir.sharding import MeshShape
from autopar.ir.values import item_bytes

# How many times an array's bytes each experiment moves to and from memory.
_PASSES = {"launch": 2, "scale": 2, "add": 3}
_LEAST_LAUNCH_SECONDS = 1e-8  # in place of a launch that the catalog has as free
_FIGURES = ("launch_seconds", "memory_bytes_per_second", "half_flops")
_PEAK = "peak_flops."


def chip_seconds(chip: Chip, experiment: Experiment) -> float:
    """Predicted seconds of an experiment on one device."""
    if experiment.kind == "matmul":
        m, k, n = experiment.shape
        nbytes = item_bytes(experiment.dtype) * (m * k + k * n + m * n)
        return compute_seconds(chip, 2.0 * m * k * n, nbytes, experiment.dtype)
    return elementwise_seconds(chip, _PASSES[experiment.kind] * experiment.shape[0])


def fit_chip(chip: Chip, samples: Sequence[Sample]) -> tuple[Chip, tuple[Bar, ...]]:
    """The chip as it was measured, and the errors of its figures.

    Rates are what was reached, so both efficiencies become 1. A dtype that was not measured keeps
    its ratio to those that were. Raises ClusterError where there are too few sizes of something.
    """
    _check_chip(samples)
    measured = {s.experiment.dtype for s in samples if s.experiment.kind == "matmul"}
    dtypes = [dtype for dtype, _ in chip.peak_flops if dtype in measured]
    reaching = _reaching(chip)

    def prices(figures: Mapping[str, float]) -> list[float]:
        tried = _with_figures(reaching, figures)
        return [chip_seconds(tried, sample.experiment) for sample in samples]

    figures = {name: float(getattr(reaching, name)) for name in _FIGURES}
    figures |= {f"{_PEAK}{dtype}": reaching.flops_for(dtype) for dtype in dtypes}
    found = fit(prices, samples, figures)
    fitted = _with_figures(reaching, {name: one.figure for name, one in found.items()})
    bars = tuple(Bar(name, one.error) for name, one in found.items() if one.error < FIRM)
    return _in_proportion(fitted, reaching, dtypes), bars


def _reaching(chip: Chip) -> Chip:
    """The chip with rates that are reached in place of peaks and efficiencies, and no free ops."""
    share = chip.compute_efficiency
    return replace(
        chip,
        launch_seconds=max(chip.launch_seconds, _LEAST_LAUNCH_SECONDS),
        memory_bytes_per_second=chip.memory_efficiency * chip.memory_bytes_per_second,
        memory_efficiency=1.0,
        compute_efficiency=1.0,
        peak_flops=tuple((dtype, share * peak) for dtype, peak in chip.peak_flops),
    )


def _with_figures(chip: Chip, figures: Mapping[str, float]) -> Chip:
    own: dict[str, Any] = {name: v for name, v in figures.items() if name in _FIGURES}
    peaks = tuple((d, figures.get(f"{_PEAK}{d}", peak)) for d, peak in chip.peak_flops)
    return replace(chip, **own, peak_flops=peaks)


def _in_proportion(fitted: Chip, before: Chip, dtypes: Sequence[str]) -> Chip:
    """The fitted chip; dtypes that were not measured as much faster as the others proved to be."""
    share = median(fitted.flops_for(dtype) / before.flops_for(dtype) for dtype in dtypes)
    peaks = tuple(
        (dtype, peak if dtype in dtypes else significant(share * peak, 4))
        for dtype, peak in fitted.peak_flops
    )
    return replace(fitted, peak_flops=peaks)


def _check_chip(samples: Sequence[Sample]) -> None:
    for kind, what in (("launch", "a tiny op"), ("scale", "memory"), ("matmul", "matmuls")):
        sizes = {math.prod(s.experiment.shape) for s in samples if s.experiment.kind == kind}
        wanted = 1 if kind == "launch" else 2
        if len(sizes) < wanted:
            raise ClusterError(
                f"{what} was measured at {len(sizes)} size{'' if len(sizes) == 1 else 's'} and a "
                f"fit needs {wanted}; give it more time, as in --seconds 60"
            )


Links = tuple[LinkLevel, ...]

_OPTIONAL = "local_bytes_per_second"  # which a catalog may have as infinite
_FREE = 10.0  # times the rate of the wire, in place of that
_LEAST_WAIT_SECONDS = 1e-7  # in place of a wait that the catalog has as none


def links_of(cluster: Cluster, experiment: Experiment) -> Links:
    """The physical levels that a collective experiment crosses."""
    return axis_links(cluster, MeshShape.of(experiment.mesh), (experiment.axis,))


def link_seconds(chip: Chip, links: Links, experiment: Experiment) -> float:
    """Predicted seconds of a collective experiment.

    An all-gather and a reduce-scatter are chained by cutting out, or writing, a member's share.
    """
    (nbytes,) = experiment.shape
    seconds = collective_seconds(experiment.kind, nbytes, links)
    if experiment.kind in ("all-gather", "reduce-scatter"):
        members = prod(link.size for link in links)
        share = replace(experiment, kind="scale", shape=(nbytes // members,))
        seconds += chip_seconds(chip, share)
    return seconds


def fit_links(
    cluster: Cluster, chip: Chip, samples: Sequence[Sample]
) -> tuple[AbstractTopology, tuple[Bar, ...]]:
    """The topology of a cluster as it was measured with a chip, and the errors of its figures.

    What no measurement rests on keeps the cluster's own figure and has no error.
    Raises ClusterError where a level with several members was measured at fewer than two sizes.
    """
    if not samples:
        return cluster.topology, ()
    _check_links(cluster, samples)
    places = {(s.experiment.mesh, s.experiment.axis): s.experiment for s in samples}

    def prices(figures: Mapping[str, float]) -> list[float]:
        tried = replace(cluster, topology=with_figures(cluster.topology, figures))
        links = {place: links_of(tried, experiment) for place, experiment in places.items()}
        asked = [s.experiment for s in samples]
        return [link_seconds(chip, links[e.mesh, e.axis], e) for e in asked]

    found = fit(prices, samples, figures_of(cluster.topology))
    figures = {
        name: one.figure
        for name, one in found.items()
        if one.error < FIRM or not name.endswith(_OPTIONAL)
    }
    topology = with_figures(cluster.topology, figures)
    return topology, tuple(Bar(name, one.error) for name, one in found.items() if one.error < FIRM)


def figures_of(topology: AbstractTopology) -> dict[str, float]:
    """The figures of a topology that a collective's price may rest on, by name."""
    own = {
        name: max(figure, _LEAST_WAIT_SECONDS) if name.endswith("seconds") else figure
        for name, figure in topology.own_figures.items()
    }
    return own | {n: v for level in topology.switch_levels for n, v in _of_level(level).items()}


def with_figures(topology: AbstractTopology, figures: Mapping[str, float]) -> AbstractTopology:
    """A topology with some of those figures in place of its own."""
    own = {name: v for name, v in figures.items() if "." not in name}
    return topology.with_figures(own, [_level_with(v, figures) for v in topology.switch_levels])


def _of_level(level: SwitchLevel) -> dict[str, float]:
    if level.size < 2:
        return {}
    rate = level.bytes_per_second
    figures = {
        "bytes_per_second": rate,
        "pair_bytes_per_second": level.pair_bytes_per_second or rate,
        "shuffle_bytes_per_second": level.shuffle_bytes_per_second or rate,
        "latency_seconds": max(level.latency_seconds, _LEAST_WAIT_SECONDS),
        "start_seconds": max(level.start_seconds, _LEAST_WAIT_SECONDS),
        _OPTIONAL: level.local_bytes_per_second or _FREE * rate,
    }
    if level.reduction_efficiency:
        figures["reduction_efficiency"] = level.reduction_efficiency
        figures["reduction_start_seconds"] = max(level.reduction_start_seconds, _LEAST_WAIT_SECONDS)
    if level.small_rate:
        figures["small_rate"] = level.small_rate
        figures["small_start_seconds"] = max(level.small_start_seconds, _LEAST_WAIT_SECONDS)
    return {f"{level.name}.{name}": figure for name, figure in figures.items()}


def _level_with(level: SwitchLevel, figures: Mapping[str, float]) -> SwitchLevel:
    prefix = f"{level.name}."
    own: dict[str, Any] = {
        name.removeprefix(prefix): v for name, v in figures.items() if name.startswith(prefix)
    }
    if "small_rate" in own:
        own["small_rate"] = min(own["small_rate"], 1.0)
    return replace(level, **own)


def _check_links(cluster: Cluster, samples: Sequence[Sample]) -> None:
    sizes: dict[str, set[int]] = {}
    for sample in samples:
        for link in links_of(cluster, sample.experiment):
            sizes.setdefault(link.name, set()).add(sample.experiment.shape[0])
    if few := sorted(name for name, found in sizes.items() if len(found) < 2):
        raise ClusterError(
            f"collectives over {', '.join(few)} were measured at one size and a fit needs two; "
            "give it more time, as in --seconds 60"
        )


# Relative errors of the fitted prices, at the median, up to which the figures are trusted so far.
_TRUST: tuple[tuple[float, Confidence], ...] = ((0.15, "high"), (0.4, "medium"))


@dataclass(frozen=True)
class Measured:
    """The samples, and the devices, software and date that they are of.

    `like` names the cluster of the catalog whose figures stand where nothing was measured.
    """

    samples: tuple[Sample, ...]
    like: str
    jax: str
    device_kind: str
    date: str


def predicted_seconds(cluster: Cluster, experiment: Experiment) -> float:
    """Seconds of an experiment as a cluster's figures predict them."""
    if experiment.kind in COLLECTIVES:
        return link_seconds(cluster.chip, links_of(cluster, experiment), experiment)
    return chip_seconds(cluster.chip, experiment)


def calibrated(cluster: Cluster, measured: Measured) -> Cluster:
    """A cluster with its figures fitted to what was measured on its devices.

    Raises ClusterError where too little was measured to fit them.
    """
    series = as_series(measured.samples)
    samples = [sample for one in series for sample in one.samples]
    on_links = [s for s in samples if s.experiment.kind in COLLECTIVES]
    chip, chip_bars = fit_chip(cluster.chip, [s for s in samples if s not in on_links])
    topology, link_bars = fit_links(cluster, chip, on_links)
    fitted = replace(cluster, chip=chip, topology=topology)
    found = _residuals(fitted, samples)
    source = Source(
        f"measured by autopar calibrate on {cluster.device_count} x {measured.device_kind} under "
        f"JAX {measured.jax}",
        "",
        measured.date,
        _trust(found),
    )
    return replace(
        fitted,
        chip=replace(chip, source=source),
        calibration=Calibration(
            measured.like, measured.jax, measured.device_kind, (*chip_bars, *link_bars), found,
            series,
        ),
    )  # fmt: skip


def refit(cluster: Cluster) -> Cluster:
    """A calibrated cluster with its figures fitted again to the measurements that it carries.

    Raises ClusterError where it carries none.
    """
    old = cluster.calibration
    if old is None:
        raise ClusterError(
            f"cluster {cluster.name} carries no measurements; give a file that autopar calibrate "
            "wrote"
        )
    like = Cluster.parse(old.like)
    chip = replace(like.chip, name=cluster.chip.name, memory_bytes=cluster.chip.memory_bytes)
    measured = Measured(old.samples, old.like, old.jax, old.device_kind, cluster.chip.source.date)
    return calibrated(replace(like, name=cluster.name, chip=chip), measured)


def _residuals(cluster: Cluster, samples: Sequence[Sample]) -> tuple[Residual, ...]:
    """The errors of a cluster's prices against what was measured, kind by kind."""
    off: dict[str, list[float]] = {}
    for sample in samples:
        kind, dtype = sample.experiment.kind, sample.experiment.dtype
        name = f"{kind} {dtype}" if kind == "matmul" else kind
        priced = predicted_seconds(cluster, sample.experiment)
        off.setdefault(name, []).append(math.expm1(abs(math.log(priced / sample.seconds))))
    return tuple(
        Residual(kind, significant(median(errors), 2), significant(max(errors), 2), len(errors))
        for kind, errors in off.items()
    )


def _trust(residuals: Sequence[Residual]) -> Confidence:
    typical = median(residual.median for residual in residuals)
    for limit, trust in _TRUST:
        if typical <= limit:
            return trust
    return "low"
