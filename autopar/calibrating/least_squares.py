"""Robust least squares of positive figures in logarithms, with standard errors.

With figures p, a model's prices t(p), measured m with relative spreads s, and figures c that
stand where nothing was measured, p minimises

    sum_i w_i huber(log(t_i(p) / m_i) / (scale sigma_i)) + sum_j (log(p_j / c_j) / prior)^2 / 2

sigma_i^2 = floor^2 + s_i^2; the floor is what no model of this form explains. The weights w grow
with the cube root of m within a series, because a price that is off costs more the longer it is.
The second sum is so weak that it only decides what the measurements leave open, which thus keeps
c. Steps are Levenberg's and Marquardt's; `scale` is the residuals' median spread, renewed between
rounds (Huber, "Robust Statistics", 1981, 7.8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.cluster.calibration import Sample

Vector: TypeAlias = npt.NDArray[np.float64]
Model: TypeAlias = Callable[[Mapping[str, float]], Sequence[float]]

FIRM = 2.0  # an error beyond which a figure is not known, not even to a factor 7 either way

_FLOOR = 0.05
_PRIOR = math.log(30.0)
_BEND = 1.345  # where Huber's loss turns from squares to straight lines
_ROUNDS, _STEPS = 6, 25
_NUDGE = 1e-4

_STARTS = (0.0, math.log(10.0), -math.log(10.0))  # as the catalog has it, all slower, all faster
_TO_SIGMA = 1.4826  # from a median absolute deviation to a normal's standard deviation


@dataclass(frozen=True)
class Fitted:
    """A figure, and the standard error of its logarithm: where small, a relative error."""

    figure: float
    error: float


def fit(model: Model, samples: Sequence[Sample], at: Mapping[str, float]) -> dict[str, Fitted]:
    """The figures with which the model prices what was measured best, by name.

    The model gives the price of each sample. `at` are positive figures to start from; those on
    which no price rests stay, and have errors beyond FIRM.
    """
    names = tuple(at)

    def prices(figures: Sequence[float]) -> Sequence[float]:
        return model(dict(zip(names, figures, strict=True)))

    logs = np.log(np.array(list(at.values())))
    measured = np.log([s.seconds for s in samples])
    sigmas = np.hypot(_FLOOR, [s.spread for s in samples])
    problem = _Problem(prices, measured, sigmas, _weights(samples), logs)
    slower = np.sign(problem.slopes(logs).sum(axis=0))
    tried = [problem.descend(logs + shift * slower) for shift in _STARTS]
    best = min(tried, key=problem.misfit)  # the first of equals
    rows = zip(names, np.exp(best), problem.errors(best), strict=True)
    return {
        name: Fitted(significant(figure, 4), significant(error, 2)) for name, figure, error in rows
    }


def _weights(samples: Sequence[Sample]) -> Vector:
    """The weight of each sample, 1 on average."""
    longest: dict[tuple[str, ...], float] = {}
    for sample in samples:
        series = sample.experiment.series
        longest[series] = max(longest.get(series, 0.0), sample.seconds)
    shares = np.array([s.seconds / longest[s.experiment.series] for s in samples])
    weights: Vector = np.cbrt(shares)
    return weights / float(weights.mean())


def significant(number: float, digits: int) -> float:
    """A number to so many digits; the rest is noise, and differs between libraries of algebra."""
    return float(f"{number:.{digits - 1}e}")


@dataclass(frozen=True)
class _Problem:
    """The least squares problem, in logarithms."""

    prices: Callable[[Sequence[float]], Sequence[float]]
    measured: Vector
    sigmas: Vector
    weights: Vector
    origin: Vector

    def residuals(self, x: Vector) -> Vector:
        """The errors of the prices, in units of what is to be expected."""
        prices = np.asarray(self.prices(np.exp(x).tolist()), dtype=np.float64)
        return (np.log(prices) - self.measured) / self.sigmas

    def slopes(self, x: Vector) -> Vector:
        """Derivatives of the residuals, [sample, figure], by central differences."""
        columns: list[Vector] = []
        for j in range(len(x)):
            step = np.zeros_like(x)
            step[j] = _NUDGE
            columns.append((self.residuals(x + step) - self.residuals(x - step)) / (2 * _NUDGE))
        return np.stack(columns, axis=1)

    def scale(self, x: Vector) -> float:
        """The spread of the residuals, 1 where they are no larger than was to be expected."""
        return max(1.0, _TO_SIGMA * float(np.median(np.abs(self.residuals(x)))))

    def misfit(self, x: Vector, scale: float = 1.0) -> float:
        """The function to minimise."""
        r = np.abs(self.residuals(x)) / scale
        bent = np.where(r <= _BEND, r**2 / 2, _BEND * (r - _BEND / 2))
        return float((self.weights * bent).sum() + (((x - self.origin) / _PRIOR) ** 2).sum() / 2)

    def descend(self, x: Vector) -> Vector:
        """A local minimum near x."""
        for _ in range(_ROUNDS):
            before, scale = x, self.scale(x)
            x = self._descend_at(x, scale)
            if np.abs(x - before).max() < _NUDGE:
                break
        return x

    def _descend_at(self, x: Vector, scale: float) -> Vector:
        damping, misfit = 1e-3, self.misfit(x, scale)
        for _ in range(_STEPS):
            gradient, curvature = self._normal(x, scale)
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            trial = x + np.clip(step, -1.0, 1.0)
            found = self.misfit(trial, scale)
            if found < misfit:
                gained, x, misfit, damping = misfit - found, trial, found, damping / 4
                if gained < 1e-9 * misfit:
                    break
            else:
                damping *= 8
                if damping > 1e8:
                    break
        return x

    def _normal(self, x: Vector, scale: float) -> tuple[Vector, Vector]:
        """Gradient and Gauss's curvature of the misfit, outliers weighed down."""
        r, slopes = self.residuals(x) / scale, self.slopes(x) / scale
        weights = self.weights * np.minimum(1.0, _BEND / np.maximum(np.abs(r), 1e-12))
        prior = np.eye(len(x)) / _PRIOR**2
        gradient = slopes.T @ (weights * r) + prior @ (x - self.origin)
        return gradient, slopes.T @ (weights[:, None] * slopes) + prior

    def errors(self, x: Vector) -> Vector:
        """Standard errors of the logarithms, which are relative errors of the figures."""
        _, curvature = self._normal(x, self.scale(x))
        return np.sqrt(np.diag(np.linalg.inv(curvature)))
