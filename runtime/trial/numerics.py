"""Runs the planned step beside the plain one on the same arguments, for several steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import VerifyError
from autopar.frontend.traced import TracedStep
from autopar.ir.verification import Numerics
from autopar.runtime.trial.compare import Result, output_errors
from autopar.runtime.trial.draw import Drawn, drawn
from autopar.runtime.trial.steps import FlatStep, as_numbers, rounding_of

STEPS = 3
_PERTURBED = 2
_UNSOUND = (
    "the plain step itself gives infinities or no numbers on these arguments: give it real ones "
    "(arrays, or a create_state beside the step)"
)

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Trial:
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


def numerics(trial: Trial, steps: int = STEPS) -> Numerics:
    """The errors of the planned step, and what is rounding among them.

    The plain step runs again from arguments that differ by one rounding: what it then does to
    itself, the planned one may do as well. Raises VerifyError where the arguments do not fit.
    """
    given, expected = _plain_run(trial, steps)
    mine = _run(trial.planned, trial.traced, given, steps)
    rounding = rounding_of(trial.traced.program)
    again = (
        _run(trial.plain, trial.traced, given, steps, _perturbation(rounding, seed))
        for seed in range(_PERTURBED)
    )
    outputs = output_errors(expected, mine, again)
    unsound = () if _is_finite(expected) else (_UNSOUND,)
    notes = (*trial.notes, *given.notes, *unsound)
    return Numerics(steps, trial.devices, trial.where, rounding, outputs, notes)


def _plain_run(trial: Trial, steps: int) -> tuple[Drawn, list[Result]]:
    """Arguments on which the plain step gives numbers, if any that are drawn do; and these."""
    given = drawn(trial.traced, trial.leaves, steps)
    results = _run(trial.plain, trial.traced, given, steps)
    if _is_finite(results):
        return given, results
    given = drawn(trial.traced, trial.leaves, steps, positive=True)
    return given, _run(trial.plain, trial.traced, given, steps)


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
