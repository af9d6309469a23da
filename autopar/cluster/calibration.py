"""Measurements of a cluster's own devices, and how firmly its figures rest on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.errors import ClusterError


@dataclass(frozen=True)
class Experiment:
    """A thing that every device does at once, over and over.

    `kind` is "launch" (a tiny op), "scale" (reads and writes an array), "add" (reads two, writes
    one), "matmul", or a collective's over `axis` of `mesh`. `shape` is m, k, n of a matmul and of
    all others the bytes of one device's whole array: for a collective what collective_seconds
    calls V.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    mesh: str = ""
    axis: str = ""

    @property
    def series(self) -> tuple[str, str, str, str]:
        """The key that it has in common with others that differ in size alone."""
        return (self.kind, self.dtype, self.mesh, self.axis)

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        where = f" over {self.axis} of ({self.mesh})" if self.axis else ""
        return f"{self.kind} {self.dtype}[{size}]{where}"


@dataclass(frozen=True)
class Sample:
    """The median seconds of an experiment over `count` runs, and their relative spread."""

    experiment: Experiment
    seconds: float
    spread: float
    count: int


@dataclass(frozen=True)
class Series:
    """The samples of experiments that differ in size alone, column by column."""

    kind: str
    dtype: str
    mesh: str
    axis: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    spreads: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        columns = (self.shapes, self.seconds, self.spreads, self.counts)
        if len({len(column) for column in columns}) != 1:
            raise ClusterError(
                f"the series of {self.kind} has {', '.join(str(len(c)) for c in columns)} shapes, "
                "seconds, spreads and counts; give as many of each"
            )
        for shape, seconds in zip(self.shapes, self.seconds, strict=True):
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ClusterError(f"{self.kind} of {shape} took {seconds} s; measure it again")

    @property
    def samples(self) -> tuple[Sample, ...]:
        """A sample for each size."""
        rows = zip(self.shapes, self.seconds, self.spreads, self.counts, strict=True)
        return tuple(
            Sample(
                Experiment(self.kind, self.dtype, shape, self.mesh, self.axis),
                seconds,
                spread,
                count,
            )
            for shape, seconds, spread, count in rows
        )


@dataclass(frozen=True)
class Bar:
    """The error bar of a figure.

    `relative_error` is the standard error of the figure's logarithm: small, a share of it.
    """

    figure: str
    relative_error: float


@dataclass(frozen=True)
class Residual:
    """The error of fitted prices for one kind of experiment.

    Errors are relative, and as large for half as for twice the seconds: 1.0.
    """

    kind: str
    median: float
    largest: float
    samples: int


@dataclass(frozen=True)
class Calibration:
    """Measurements of a cluster, and how the figures fitted to them hold.

    `like` names the cluster of the catalog whose figures stand where nothing was measured. Bars
    name figures as "launch_seconds", "peak_flops.bf16" or "nvlink.bytes_per_second".
    """

    like: str
    jax: str
    device_kind: str
    bars: tuple[Bar, ...]
    residuals: tuple[Residual, ...]
    series: tuple[Series, ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples of all series."""
        return tuple(sample for series in self.series for sample in series.samples)

    def error_of(self, figure: str) -> float | None:
        """The relative standard error of a figure, None where it was not measured."""
        return next((bar.relative_error for bar in self.bars if bar.figure == figure), None)


def as_series(samples: Sequence[Sample]) -> tuple[Series, ...]:
    """Samples by series and size, in an order that does not tell when each was taken."""
    ordered = sorted(samples, key=lambda s: (s.experiment.series, s.experiment.shape))
    return tuple(
        _one_series(list(rows)) for _, rows in groupby(ordered, lambda s: s.experiment.series)
    )


def _one_series(rows: list[Sample]) -> Series:
    first = rows[0].experiment
    return Series(
        first.kind,
        first.dtype,
        first.mesh,
        first.axis,
        tuple(r.experiment.shape for r in rows),
        tuple(r.seconds for r in rows),
        tuple(r.spread for r in rows),
        tuple(r.count for r in rows),
    )
