"""Runs the planned step beside the plain one, and tells errors from rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import VerifyError
from autopar.frontend.traced import TracedStep
from autopar.ir.verification import Numerics, OutputError
from autopar.runtime.validation.arguments import Drawn, drawn
from autopar.runtime.validation.steps import FlatStep, as_numbers, rounding_of

STEPS = 3
_PERTURBED = 2
_UNSOUND = (
    "the plain step itself gives infinities or no numbers on these arguments: give it real ones "
    "(arrays, or a create_state beside the step)"
)

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Validation:
    """A step as its user wrote it, and as it was planned; both are functions of flat arguments.

    `leaves` are those arguments, arrays or their types. `where` are the meshes that the planned one
    runs on.
    """

    traced: TracedStep
    leaves: tuple[Any, ...]
    plain: FlatStep
    planned: FlatStep
    where: str
    devices: int
    notes: tuple[str, ...] = ()


def numerics(validation: Validation, steps: int = STEPS) -> Numerics:
    """The errors of the planned step, and what is rounding among them.

    The plain step runs again from arguments that differ by one rounding: what it then does to
    itself, the planned one may do as well. Raises VerifyError where the arguments do not fit.
    """
    given, expected = _plain_run(validation, steps)
    mine = _run(validation.planned, validation.traced, given, steps)
    rounding = rounding_of(validation.traced.program)
    again = (
        _run(validation.plain, validation.traced, given, steps, _perturbation(rounding, seed))
        for seed in range(_PERTURBED)
    )
    outputs = output_errors(expected, mine, again)
    unsound = () if _is_finite(expected) else (_UNSOUND,)
    notes = (*validation.notes, *given.notes, *unsound)
    return Numerics(steps, validation.devices, validation.where, rounding, outputs, notes)


def _plain_run(validation: Validation, steps: int) -> tuple[Drawn, list[Result]]:
    """Arguments on which the plain step gives numbers, if any that are drawn do; and these."""
    given = drawn(validation.traced, validation.leaves, steps)
    results = _run(validation.plain, validation.traced, given, steps)
    if _is_finite(results):
        return given, results
    given = drawn(validation.traced, validation.leaves, steps, positive=True)
    return given, _run(validation.plain, validation.traced, given, steps)


def _is_finite(results: Sequence[Result]) -> bool:
    return all(np.isfinite(r.change).all() for r in results)


def _as_it_is(leaf: Any) -> Any:
    return leaf


def _run(
    step: FlatStep, traced: TracedStep, given: Drawn, steps: int, change: Change = _as_it_is
) -> list[Result]:
    """The results of every step and the state after the last; `change` is of all arguments."""
    returns = dict(traced.donated)
    leaves = list(map(change, given.leaves(0)))
    first = list(leaves)
    found: list[Result] = []
    for i in range(steps):
        made = step(leaves)
        if len(made) != len(traced.output_paths):
            raise VerifyError(
                f"{traced.name} gave {len(made)} arrays and was traced with "
                f"{len(traced.output_paths)}: what it returns may depend only on shapes"
            )
        found += [
            Result(traced.output_paths[o], as_numbers(made[o]))
            for o in range(len(made)) if o not in returns
        ]  # fmt: skip
        if i + 1 < steps:
            leaves = list(map(change, given.leaves(i + 1)))
        for output, own in returns.items():
            leaves[own] = made[output]
    found += [
        Result(traced.input_paths[own], as_numbers(leaves[own]), as_numbers(first[own]))
        for own in returns.values()
    ]
    return found


def _perturbation(rounding: float, seed: int) -> Change:
    """A change of every float by the rounding or nothing, or its opposite, by chance."""
    rng = np.random.default_rng(seed)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or np.issubdtype(leaf.dtype, np.integer):
            return leaf
        numbers: np.ndarray[Any, Any] = leaf
        if numbers.dtype == np.bool_:
            return numbers
        signs = rng.integers(-1, 2, size=numbers.shape)
        wide = np.complex128 if np.iscomplexobj(numbers) else np.float64
        return np.asarray(numbers.astype(wide) * (1.0 + rounding * signs)).astype(numbers.dtype)

    return change


# -- errors and rounding -----------------------------------------------------------------------


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
        """The change over the steps, so that an update does not drown in what it is added to."""
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
