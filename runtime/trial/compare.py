"""Says whether two runs of a step differ by more than rounding does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.verification import OutputError

Array = np.ndarray[Any, Any]

TOLERANCE = 1e-5  # of each tensor's largest magnitude, for floats; nothing else may differ
# Of how far the plain step goes when its arguments change by one rounding: sums in another order
# round anew at every level, and the largest of a few draws is not the largest there is.
_NOISE = 4.0


@dataclass(frozen=True)
class Result:
    """An output of a step: its path, its numbers, and for state those that it started from."""

    path: str
    numbers: Array
    start: Array | None = None

    @property
    def change(self) -> Array:
        """What the steps made of it: an update does not drown in what it is added to."""
        return _wide(self.numbers) - (0.0 if self.start is None else _wide(self.start))


def output_errors(
    plain: Sequence[Result], planned: Sequence[Result], perturbed: Iterable[Sequence[Result]]
) -> tuple[OutputError, ...]:
    """The errors of a planned run, path by path, beside the noise of the plain one.

    `perturbed` are plain runs from arguments that differ by one rounding. A path that occurs
    several times, once a step, has its worst error.
    """
    noise = np.zeros(len(plain))
    for run in perturbed:
        gaps = [_gap(a.change, b.change) for a, b in zip(run, plain, strict=True)]
        noise = np.maximum(noise, gaps)
    found: dict[str, OutputError] = {}
    for mine, expected, own in zip(planned, plain, noise.tolist(), strict=True):
        error = _output_error(mine, expected, float(own))
        held = found.get(error.path)
        if held is None or _excess(error) > _excess(held):
            found[error.path] = error
    return tuple(found.values())


def _output_error(mine: Result, expected: Result, noise: float) -> OutputError:
    scale = _scale(expected.numbers)
    least = TOLERANCE if _is_inexact(expected.numbers) else 0.0
    same = mine.numbers.shape == expected.numbers.shape
    same = same and mine.numbers.dtype == expected.numbers.dtype
    error = _gap(_wide(mine.numbers), _wide(expected.numbers)) / scale if same else np.inf
    return OutputError(expected.path, error, noise / scale, max(least, _NOISE * noise / scale))


def _excess(error: OutputError) -> float:
    """By how much an error is over its tolerance."""
    return error.error - error.tolerance


def _gap(left: Array, right: Array) -> float:
    """The largest difference; infinite where one is a number and the other is not."""
    if not left.size:
        return 0.0
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return float("inf")
    odd = ~finite
    if not np.array_equal(left[odd], right[odd], equal_nan=True):
        return float("inf")
    return float(np.max(np.abs(left[finite] - right[finite]), initial=0.0))


def _scale(numbers: Array) -> float:
    """The largest magnitude that is a number; 1 where there is none."""
    wide = np.abs(_wide(numbers))
    return float(np.max(wide[np.isfinite(wide)], initial=0.0)) or 1.0


def _wide(numbers: Array) -> Array:
    """Numbers in which differences of any dtype can be taken."""
    kind = np.complex128 if np.iscomplexobj(numbers) else np.float64
    return numbers.astype(kind)


def _is_inexact(numbers: Array) -> bool:
    return not np.issubdtype(numbers.dtype, np.integer) and numbers.dtype != np.bool_
