"""Fits what joins the devices to how long collectives over the axes of meshes took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from autopar.calibrating.chip import chip_seconds
from autopar.calibrating.least_squares import FIRM, fit
from autopar.cluster import AbstractTopology, Chip, Cluster, LinkLevel, SwitchLevel, axis_links
from autopar.cluster.calibration import Bar, Experiment, Sample
from autopar.cost import collective_seconds
from autopar.errors import ClusterError
from autopar.ir.mesh import MeshShape

Links = tuple[LinkLevel, ...]

_OPTIONAL = "local_bytes_per_second"  # which a catalog may have as infinite
_FREE = 10.0  # times the rate of the wire, in place of that
_LEAST_SECONDS = 1e-7  # in place of a wait that the catalog has as none


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
    _check(cluster, samples)
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
        name: max(figure, _LEAST_SECONDS) if name.endswith("seconds") else figure
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
        "latency_seconds": max(level.latency_seconds, _LEAST_SECONDS),
        "start_seconds": max(level.start_seconds, _LEAST_SECONDS),
        _OPTIONAL: level.local_bytes_per_second or _FREE * rate,
    }
    if level.reduction_efficiency:
        figures["reduction_efficiency"] = level.reduction_efficiency
        figures["reduction_start_seconds"] = max(level.reduction_start_seconds, _LEAST_SECONDS)
    return {f"{level.name}.{name}": figure for name, figure in figures.items()}


def _level_with(level: SwitchLevel, figures: Mapping[str, float]) -> SwitchLevel:
    prefix = f"{level.name}."
    own: dict[str, Any] = {
        name.removeprefix(prefix): v for name, v in figures.items() if name.startswith(prefix)
    }
    return replace(level, **own)


def _check(cluster: Cluster, samples: Sequence[Sample]) -> None:
    sizes: dict[str, set[int]] = {}
    for sample in samples:
        for link in links_of(cluster, sample.experiment):
            sizes.setdefault(link.name, set()).add(sample.experiment.shape[0])
    if few := sorted(name for name, found in sizes.items() if len(found) < 2):
        raise ClusterError(
            f"collectives over {', '.join(few)} were measured at one size and a fit needs two; "
            "give it more time, as in --seconds 60"
        )
