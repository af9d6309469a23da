"""From measurements to the cluster that planning uses, the same for the same measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from autopar.calibrating.chip import chip_seconds, fit_chip
from autopar.calibrating.least_squares import significant
from autopar.calibrating.links import fit_links, link_seconds, links_of
from autopar.cluster import Cluster, Source
from autopar.cluster.calibration import Calibration, Experiment, Residual, Sample, as_series
from autopar.cluster.chip import Confidence
from autopar.cost.collective import COLLECTIVE_KINDS
from autopar.errors import ClusterError

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
    if experiment.kind in COLLECTIVE_KINDS:
        return link_seconds(cluster.chip, links_of(cluster, experiment), experiment)
    return chip_seconds(cluster.chip, experiment)


def calibrated(cluster: Cluster, measured: Measured) -> Cluster:
    """A cluster with its figures fitted to what was measured on its devices.

    Raises ClusterError where too little was measured to fit them.
    """
    series = as_series(measured.samples)
    samples = [sample for one in series for sample in one.samples]
    on_links = [s for s in samples if s.experiment.kind in COLLECTIVE_KINDS]
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
