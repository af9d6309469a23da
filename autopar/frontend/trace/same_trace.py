"""Tells whether two traces are the same step to the letter, though other objects led to them.

Functions that are made anew, as those in an optimizer or a model's lambda, are other objects with
every call, and their step is traced again. Where it does the same, it needs no plan of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from autopar.frontend.trace.inline import flatten
from autopar.frontend.trace.written_out import BODIES
from autopar.frontend.traced import Const, Equation, FlatProgram, TracedStep

_SMALL_BYTES = 1 << 20  # closed-over arrays up to which their values are compared


def is_same_trace(one: TracedStep, other: TracedStep) -> bool:
    """True if both run the same program on the same arguments, to results of the same paths.

    Never true in doubt: of parameters that are functions both have the very same. Trees of
    arguments and of results may hold other constants, and more may be marked as state.
    """
    return (
        (one.name, one.input_paths, one.output_paths, one.donated)
        == (other.name, other.input_paths, other.output_paths, other.donated)
        and _all_same(one.constants, other.constants)
        and _is_same_program(one.program, other.program)
    )


def _is_same_program(one: FlatProgram, other: FlatProgram) -> bool:
    """True if values have the same numbers, types and equations."""
    return (
        (one.inputs, one.input_avals) == (other.inputs, other.input_avals)
        and _all_same(one.outputs, other.outputs)
        and len(one.equations) == len(other.equations)
        and all(map(_is_same_equation, one.equations, other.equations))
    )


def _is_same_equation(one: Equation, other: Equation) -> bool:
    return (
        one.primitive is other.primitive
        and (one.results, one.result_avals) == (other.results, other.result_avals)
        and (one.name_stack, one.line) == (other.name_stack, other.line)
        and one.has_effects == other.has_effects
        and _all_same(one.operands, other.operands)
        and len(one.bodies) == len(other.bodies)
        and all(map(_is_same_program, one.bodies, other.bodies))
        and one.params.keys() == other.params.keys()
        and all(
            _is_same(value, other.params[name])
            for name, value in one.params.items()
            if name not in BODIES.get(one.primitive.name, ())
        )
    )


def _all_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    """True for the same object, and for equal data; NaN is the same as itself, 0.0 not as -0.0."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case Const():
            return bool(one.aval == other.aval) and _is_same(one.value, other.value)
        case jex.Jaxpr() | jex.ClosedJaxpr():
            programs = [flatten(_closed(jaxpr)) for jaxpr in (one, other)]
            (first, arrays), (second, others) = programs
            return _all_same(arrays, others) and _is_same_program(first, second)
        case tuple() | list():
            return _all_same(one, other)
        case np.ndarray() | np.generic() | jax.Array():
            return _is_same_array(one, other)
        case float() | complex():
            return repr(one) == repr(other)
        case _:
            return bool(one == other)


def _closed(jaxpr: Any) -> Any:
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def _is_same_array(one: Any, other: Any) -> bool:
    """True if two small arrays hold the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.nbytes > _SMALL_BYTES:
        return False
    if jax.dtypes.issubdtype(one.dtype, jax.dtypes.extended):
        return False
    if not all(getattr(array, "is_fully_addressable", True) for array in (one, other)):
        return False
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()
