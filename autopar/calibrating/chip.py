"""Fits a chip's figures to how long matmuls, passes over memory and tiny ops took on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from autopar.calibrating.least_squares import FIRM, fit, significant
from autopar.cluster import Chip
from autopar.cluster.calibration import Bar, Experiment, Sample
from autopar.cost import compute_seconds, elementwise_seconds
from autopar.errors import ClusterError
from autopar.ir.values import item_bytes

# How many times an array's bytes each experiment moves to and from memory.
_PASSES = {"launch": 2, "scale": 2, "add": 3}
_LEAST_SECONDS = 1e-8  # in place of a launch that the catalog has as free
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
    _check(samples)
    dtypes = [dtype for dtype, _ in chip.peak_flops if _was_measured(dtype, samples)]
    reaching = _reaching(chip)

    def prices(figures: Mapping[str, float]) -> list[float]:
        tried = _with_figures(reaching, figures)
        return [chip_seconds(tried, sample.experiment) for sample in samples]

    found = fit(prices, samples, _figures_of(reaching, dtypes))
    fitted = _with_figures(reaching, {name: one.figure for name, one in found.items()})
    bars = tuple(Bar(name, one.error) for name, one in found.items() if one.error < FIRM)
    return _in_proportion(fitted, reaching, dtypes), bars


def _was_measured(dtype: str, samples: Sequence[Sample]) -> bool:
    return any(s.experiment.kind == "matmul" and s.experiment.dtype == dtype for s in samples)


def _reaching(chip: Chip) -> Chip:
    """The chip with rates that are reached in place of peaks and efficiencies, and no free ops."""
    share = chip.compute_efficiency
    return replace(
        chip,
        launch_seconds=max(chip.launch_seconds, _LEAST_SECONDS),
        memory_bytes_per_second=chip.memory_efficiency * chip.memory_bytes_per_second,
        memory_efficiency=1.0,
        compute_efficiency=1.0,
        peak_flops=tuple((dtype, share * peak) for dtype, peak in chip.peak_flops),
    )


def _figures_of(chip: Chip, dtypes: Sequence[str]) -> dict[str, float]:
    own = {name: float(getattr(chip, name)) for name in _FIGURES}
    return {**own, **{f"{_PEAK}{dtype}": chip.flops_for(dtype) for dtype in dtypes}}


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


def _check(samples: Sequence[Sample]) -> None:
    for kind, what in (("launch", "a tiny op"), ("scale", "memory"), ("matmul", "matmuls")):
        sizes = {math.prod(s.experiment.shape) for s in samples if s.experiment.kind == kind}
        wanted = 1 if kind == "launch" else 2
        if len(sizes) < wanted:
            raise ClusterError(
                f"{what} was measured at {len(sizes)} size{'' if len(sizes) == 1 else 's'} and a "
                f"fit needs {wanted}; give it more time, as in --seconds 60"
            )
