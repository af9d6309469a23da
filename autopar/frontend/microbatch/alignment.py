"""Alignment of a step traced on a part of the rows with the step traced on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from autopar.errors import BatchError, listing
from autopar.frontend.plain_data import plain_params, type_of
from autopar.frontend.rewrite.splice import rename
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.graph import Plain
from autopar.ir.values import Value

# Where an equation's operands from this position on say which rows of its first to take.
_INDEXING = {
    "gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2,
    "scatter": 1, "scatter-add": 1, "scatter-mul": 1, "scatter-min": 1, "scatter-max": 1,
}  # fmt: skip
# Parameters that say where, not how much: those of slices along the batch.
_PLACES = frozenset({"start_indices", "limit_indices", "padding_config"})
_BARRIER = "optimization_barrier"
_LARGER = "Microbatches of other sizes may do, as may a step that never asks for the batch size."


def align(whole: TracedStep, part: TracedStep) -> FlatProgram:
    """The part's program with every constant that differs replaced by the whole step's.

    Raises BatchError where the equations differ in more than the sizes of their operands (E2), or
    where a number made of the batch size says which rows to read (E3).
    """
    fault = "the arrays that it closes over differ in number"
    # 1. The same equations in the same order, reading the same values.
    if whole.input_paths == part.input_paths:
        fault = _Twins().first_difference(whole.program, part.program)
    if fault:
        raise BatchError(_describe_difference(whole, fault))
    # 2. Constants of the part become the whole's, unless they say which rows to read (E3).
    return _Alignment(whole.name).program(whole.program, part.program)


def has_rows(whole: Sequence[int], part: Sequence[int]) -> bool:
    """True if a value has rows of the batch, by its shape on the whole batch and on a part."""
    return tuple(whole) != tuple(part)


def _describe_difference(whole: TracedStep, fault: str) -> str:
    return listing(
        f"{whole.name} cannot be cut into microbatches: its structure depends on the batch size.",
        [fault],
        f"Write it so that every batch size runs the same operations. {_LARGER}",
    )


# -- structure -----------------------------------------------------------------------------


class _Twins:
    """Finds the value of the whole step for each of the part's, equation by equation."""

    def __init__(self) -> None:
        self._twin: dict[Ref, Ref] = {}

    def first_difference(self, whole: FlatProgram, part: FlatProgram) -> str:
        """Describe the first equations that are not alike, bodies included; "" if all are."""
        self._twin.update(zip(part.inputs, whole.inputs, strict=True))
        for one, other in zip(whole.equations, part.equations, strict=False):
            if not self._alike(one, other):
                return f"on the whole batch it runs {_show(one)}, on a part {_show(other)}"
            for inner, own in zip(one.bodies, other.bodies, strict=True):
                fault = self.first_difference(inner, own)
                if fault:
                    return fault
            self._twin.update(zip(other.results, one.results, strict=True))
        more, fewer = len(whole.equations), len(part.equations)
        if more != fewer:
            longer, where = (whole, "the whole batch") if more > fewer else (part, "a part")
            return f"only on {where} it runs {_show(longer.equations[min(more, fewer)])}"
        if not self._same_operands(whole.outputs, part.outputs):
            return "what it returns is not made by the same operations"
        return ""

    def _alike(self, whole: Equation, part: Equation) -> bool:
        return (
            whole.primitive is part.primitive
            and self._same_operands(whole.operands, part.operands)
            and [_kind(a) for a in whole.result_avals] == [_kind(a) for a in part.result_avals]
            and [len(b.inputs) for b in whole.bodies] == [len(b.inputs) for b in part.bodies]
            and not _odd_params(whole, part)
        )

    def _same_operands(self, whole: Sequence[Ref | Const], part: Sequence[Ref | Const]) -> bool:
        """True if the same values are read, and literals at the same places."""
        return len(whole) == len(part) and all(
            self._twin.get(b) == a
            if isinstance(b, int)
            else isinstance(a, Const) and _kind(a.aval) == _kind(b.aval)
            for a, b in zip(whole, part, strict=True)
        )


def _kind(aval: Any) -> tuple[int, str]:
    shape, dtype = type_of(aval)
    return len(shape), dtype


def _odd_params(whole: Equation, part: Equation) -> list[str]:
    """Parameters that differ by more than the sizes that they name."""
    whole_size = [n for s in (*whole.operand_shapes, *_shapes(whole)) for n in s]
    part_size = [n for s in (*part.operand_shapes, *_shapes(part)) for n in s]
    ratios = {(a, b) for a, b in zip(whole_size, part_size, strict=False) if a != b}
    named = dict(plain_params(part.params))
    return [
        name
        for name, value in plain_params(whole.params)
        if not _alike_values(value, named.get(name), ratios if name not in _PLACES else None)
    ]


def _shapes(equation: Equation) -> Iterator[tuple[int, ...]]:
    return (tuple(getattr(a, "shape", ())) for a in equation.result_avals)


def _alike_values(whole: Plain, part: Plain, ratios: set[tuple[int, int]] | None) -> bool:
    """True if plain values are equal but for whole numbers that grow as the sizes do."""
    if isinstance(whole, tuple) and isinstance(part, tuple):
        return len(whole) == len(part) and all(
            _alike_values(a, b, ratios) for a, b in zip(whole, part, strict=True)
        )
    if whole == part:
        return True
    numbers = isinstance(whole, int) and isinstance(part, int)
    return numbers and (ratios is None or (whole, part) in ratios)


def _show(equation: Equation) -> str:
    shapes = ", ".join(Value("", *type_of(a)).type_text for a in equation.result_avals)
    return f"{equation.primitive.name} -> {shapes} at {equation.line or '?'}"


# -- constants -----------------------------------------------------------------------------


class _Alignment:
    """Writes the whole step's names and constants into the part's equations."""

    def __init__(self, name: str) -> None:
        self._name = name

    def program(self, whole: FlatProgram, part: FlatProgram) -> FlatProgram:
        """The part's program, or a body of it."""
        # Numbers made of a constant that differs carry the batch size on, until they index rows.
        sized: dict[Ref, str] = {}  # whole numbers made of the batch size -> where
        pairs = zip(whole.equations, part.equations, strict=True)
        return FlatProgram(
            whole.inputs,
            part.input_avals,
            tuple(self._equation(one, own, sized) for one, own in pairs),
            _whole_operands(whole.outputs, part.outputs),
        )

    def _equation(self, whole: Equation, part: Equation, sized: dict[Ref, str]) -> Equation:
        self._check_indices(whole, part, sized)
        if _differ(whole.operands, part.operands) or not sized.keys().isdisjoint(
            refs(whole.operands)
        ):
            kinds = zip(whole.results, part.result_avals, strict=True)
            sized.update((r, part.line) for r, aval in kinds if _counts(aval))
        bodies = zip(whole.bodies, part.bodies, strict=True)
        return replace(
            part,
            operands=_whole_operands(whole.operands, part.operands),
            results=whole.results,
            bodies=tuple(self.program(one, own) for one, own in bodies),
        )

    def _check_indices(self, whole: Equation, part: Equation, sized: dict[Ref, str]) -> None:
        """E3: rows of the batch are read at places that count from the whole batch's size."""
        # A gather or slice of rows at such a number reads other rows than the microbatch's.
        start = _INDEXING.get(part.primitive.name)
        if start is None or not has_rows(whole.operand_shapes[0], part.operand_shapes[0]):
            return
        for ref in refs(whole.operands[start:]):
            if ref in sized:
                raise BatchError(_indexes(self._name, whole, sized[ref]))


def _indexes(name: str, equation: Equation, line: str) -> str:
    shape = list(equation.operand_shapes[0])
    return listing(
        f"{name} cannot be cut into microbatches: the batch size is used as an index.",
        [
            f"{equation.primitive.name} at {equation.line or '?'} reads an array of shape {shape} "
            f"at places that count from the number of its rows ({line or '?'})"
        ],
        "Read each row by what lies beside it: jnp.take_along_axis(x, i[:, None], 1) for "
        "x[jnp.arange(n), i], or jax.vmap of the code for one example.",
    )


def _counts(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.integer)


def _differ(whole: Sequence[Ref | Const], part: Sequence[Ref | Const]) -> bool:
    """True if some literal is another number on the whole batch."""
    return any(
        isinstance(a, Const) and isinstance(b, Const) and _whole_operand(a, b) is a
        for a, b in zip(whole, part, strict=True)
    )


def _whole_operands(
    whole: Sequence[Ref | Const], part: Sequence[Ref | Const]
) -> tuple[Ref | Const, ...]:
    return tuple(_whole_operand(a, b) for a, b in zip(whole, part, strict=True))


def _whole_operand(whole: Ref | Const, part: Ref | Const) -> Ref | Const:
    """The whole step's value or literal; an array with rows is the part's, to be cut elsewhere."""
    # Values are named as in the whole trace; constants are its own, so that a mean divides by B.
    if not isinstance(whole, Const) or not isinstance(part, Const):
        return whole
    return part if has_rows(whole.aval.shape, part.aval.shape) or _equal(whole, part) else whole


def _equal(whole: Const, part: Const) -> bool:
    if whole.value is part.value:
        return True
    if jax.dtypes.issubdtype(whole.aval.dtype, jax.dtypes.extended):
        return False
    return np.array_equal(np.asarray(whole.value), np.asarray(part.value))


# -- sizes of a trace brought down to a number of rows that it was not traced on ------------------


@dataclass(frozen=True)
class Trial:
    """Rows of the whole batch, of the trace at hand, and those that are wanted."""

    batch: int
    tried: int
    wanted: int

    def size(self, whole: int, tried: int) -> int:
        """A size at the wanted rows: sizes grow linearly with them."""
        # Two sizes tell the line: size(rows) = tried + (rows - tried rows) * slope.
        step, rest = divmod(whole - tried, self.batch - self.tried)
        size = tried + step * (self.wanted - self.tried)
        if rest or size < 0:
            raise BatchError(
                f"a size is {whole} on {self.batch} rows and {tried} on {self.tried}, so unknown "
                f"on {self.wanted}. Take fewer microbatches, of more rows each."
            )
        return size


def resize(whole: FlatProgram, tried: FlatProgram, trial: Trial) -> FlatProgram:
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
        bodies=tuple(resize(one, own, trial) for one, own in bodies),
    )


def _holds_sizes(equation: Equation) -> bool:
    """True if a jaxpr among the parameters works on arrays: a scatter's combines two numbers."""
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


def rows_behind_barriers(whole: FlatProgram, part: FlatProgram) -> tuple[FlatProgram, FlatProgram]:
    """Two traces at different batch sizes whose barriers hold back nothing but rows of the batch.

    A weight or a finished sum that went through one with rows would be known only within the
    loop over microbatches, though it is the same in all of them. What is recomputed of rows is as
    much kept apart from the forward pass as before.
    """
    places = dict(_places_of_rows(whole, part))
    return _loosen(whole, places), _loosen(part, places)


def _places_of_rows(whole: FlatProgram, part: FlatProgram) -> Iterator[tuple[Ref, tuple[int, ...]]]:
    """The first result of every barrier that holds more than rows, and which of them do."""
    for one, own in zip(whole.walk(), part.walk(), strict=True):
        if one.primitive.name == _BARRIER:
            pairs = zip(one.result_avals, own.result_avals, strict=True)
            places = tuple(i for i, (a, b) in enumerate(pairs) if has_rows(a.shape, b.shape))
            if 0 < len(places) < len(one.results):
                yield one.results[0], places


def _loosen(program: FlatProgram, places: Mapping[Ref, tuple[int, ...]]) -> FlatProgram:
    """A program in which barriers hold their results at these places alone."""
    names: dict[Ref, Ref | Const] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        bodies = tuple(_loosen(body, places) for body in equation.bodies)
        here = replace(equation, operands=rename(equation.operands, names), bodies=bodies)
        held = places.get(here.results[0]) if here.results else None
        if held is not None:
            names.update(zip(here.results, here.operands, strict=True))
            here = _hold(here, held)
            for result in here.results:
                del names[result]
        equations.append(here)
    return replace(program, equations=tuple(equations), outputs=rename(program.outputs, names))


def _hold(barrier: Equation, places: Sequence[int]) -> Equation:
    return replace(
        barrier,
        operands=tuple(barrier.operands[i] for i in places),
        operand_shapes=tuple(barrier.operand_shapes[i] for i in places),
        results=tuple(barrier.results[i] for i in places),
        result_avals=tuple(barrier.result_avals[i] for i in places),
    )
