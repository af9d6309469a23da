"""Brings the sizes of a trace down to a number of rows that it was not traced on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core as jex

from autopar.errors import BatchError
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref


@dataclass(frozen=True)
class Trial:
    """Rows of the whole batch, of the trace at hand, and those that are wanted."""

    batch: int
    tried: int
    wanted: int

    def size(self, whole: int, tried: int) -> int:
        """A size at the wanted rows: sizes grow linearly with them."""
        step, rest = divmod(whole - tried, self.batch - self.tried)
        size = tried + step * (self.wanted - self.tried)
        if rest or size < 0:
            raise BatchError(
                f"a size is {whole} on {self.batch} rows and {tried} on {self.tried}, so unknown "
                f"on {self.wanted}. Take fewer microbatches, of more rows each."
            )
        return size


def resized(whole: FlatProgram, tried: FlatProgram, trial: Trial) -> FlatProgram:
    """The program as a trace on the wanted rows would be, were no size of 1 special to JAX.

    Both programs must be alike but for sizes. Raises BatchError where one is no linear function
    of the rows, or is hidden in a kernel.
    """
    return FlatProgram(
        tried.inputs,
        _avals(whole.input_avals, tried.input_avals, trial),
        tuple(
            _equation(one, own, trial)
            for one, own in zip(whole.equations, tried.equations, strict=True)
        ),
        _operands(whole.outputs, tried.outputs, trial),
    )


def _equation(whole: Equation, tried: Equation, trial: Trial) -> Equation:
    if not tried.bodies and _holds_sizes(whole) and whole.operand_shapes != tried.operand_shapes:
        raise BatchError(
            f"{tried.primitive.name} at {tried.line or '?'} holds code of its own, whose sizes on "
            f"{trial.wanted} rows are unknown. Take fewer microbatches, of more rows each."
        )
    bodies = zip(whole.bodies, tried.bodies, strict=True)
    return replace(
        tried,
        params={k: _sized(whole.params[k], v, trial) for k, v in tried.params.items()},
        operands=_operands(whole.operands, tried.operands, trial),
        operand_shapes=_sized(whole.operand_shapes, tried.operand_shapes, trial),
        result_avals=_avals(whole.result_avals, tried.result_avals, trial),
        bodies=tuple(resized(one, own, trial) for one, own in bodies),
    )


def _holds_sizes(equation: Equation) -> bool:
    """Whether a jaxpr among the parameters works on arrays: a scatter's combines two numbers."""
    inner = jex.jaxprs_in_params(equation.params)
    return any(getattr(v.aval, "shape", ()) for jaxpr in inner for v in jaxpr.invars)


def _avals(whole: Sequence[Any], tried: Sequence[Any], trial: Trial) -> tuple[Any, ...]:
    return tuple(_aval(one, own, trial) for one, own in zip(whole, tried, strict=True))


def _aval(whole: Any, tried: Any, trial: Trial) -> Any:
    if getattr(tried, "shape", None) == getattr(whole, "shape", None):
        return tried
    return tried.update(shape=_sized(whole.shape, tried.shape, trial))


def _operands(
    whole: Sequence[Ref | Const], tried: Sequence[Ref | Const], trial: Trial
) -> tuple[Ref | Const, ...]:
    """Literals get the type they would have; what is in one with rows is cut from the whole."""
    return tuple(
        Const(own.value, _aval(one.aval, own.aval, trial))
        if isinstance(one, Const) and isinstance(own, Const)
        else own
        for one, own in zip(whole, tried, strict=True)
    )


def _sized(whole: Any, tried: Any, trial: Trial) -> Any:
    """A parameter, its differing whole numbers at the wanted rows."""
    if isinstance(tried, tuple) and isinstance(whole, tuple) and len(whole) == len(tried):
        items = [_sized(one, own, trial) for one, own in zip(whole, tried, strict=True)]
        fields = getattr(tried, "_fields", None)
        return type(tried)(*items) if fields is not None else tuple(items)
    if type(tried) is int and type(whole) is int and whole != tried:
        return trial.size(whole, tried)
    return tried
