"""Fourier transforms of pieces, kept from what XLA:CPU cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint

from autopar.frontend.traced import Equation
from autopar.runtime.local.base import Local, LocalRun
from autopar.runtime.local.rebind import run_as_is


def _fft(equation: Equation, operands: Sequence[Any], local: Local) -> Sequence[Any]:
    """The transform, on XLA:CPU of arrays that lie row by row.

    An all-gather along another dim than the first asks XLA for a layout with that dim outermost.
    Its neighbours take that layout over, and the transform of XLA:CPU then fails as it runs: it
    knows rows alone and does not say so in time.
    """
    if local.platform != "cpu":
        return run_as_is(equation, operands, local)
    (made,) = run_as_is(equation, [_by_rows(operands[0])], local)
    return [_by_rows(made)]


def _by_rows(value: Any) -> Any:
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


RUNS: dict[str, LocalRun] = {"fft": _fft}
