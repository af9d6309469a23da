"""Alignment of a step traced on a part of the rows with the step traced on all of them.

    whole (8 rows)               part (2 rows)                aligned
    %5: f32[8] = exp(%4)         %9: f32[2] = exp(%8)         %5: f32[2] = exp(%4)
    %6: f32[] = reduce_sum(%5)   %10: f32[] = reduce_sum(%9)  %6: f32[] = reduce_sum(%5)
    %7: f32[] = div(%6, 8.0)     %11: f32[] = div(%10, 2.0)   %7: f32[] = div(%6, 8.0)

1. `align`                  the same equations, or E2; names and constants of the whole, or E3
2. `resize`                 where one row was traced as two or three: its sizes brought down
3. `rows_behind_barriers`   barriers that hold rows back hold nothing else
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.extend import core as jex

from autopar.errors import BatchError, bulleted
from autopar.frontend.plain_data import plain_params, type_of
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs, rename
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
    # 1. The same equations in the same order, reading the same values.
    fault = "the arrays that it closes over differ in number"
    if whole.input_paths == part.input_paths:
        fault = _Twins().first_difference(whole.program, part.program)
    if fault:
        name = whole.name
        raise BatchError(
            bulleted(
                f"{name} cannot be cut into microbatches: its structure depends on the batch size.",
                [fault],
                f"Write it so that every batch size runs the same operations. {_LARGER} A step "
                "that adds up the gradients of parts of its batch can leave that to microbatches=.",
            )
        )
    # 2. Constants of the part become the whole's, unless they say which rows to read (E3).
    return _with_constants(whole.name, whole.program, part.program)


def has_rows(whole: Sequence[int], part: Sequence[int]) -> bool:
    """True if a value has rows of the batch, by its shape on the whole batch and on a part."""
    return tuple(whole) != tuple(part)


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
    if part.has_plain_params and whole.params == part.params:
        return []
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


def _with_constants(name: str, whole: FlatProgram, part: FlatProgram) -> FlatProgram:
    """The part's program, or a body of it, with the whole step's names and constants."""
    # Whole numbers made of a constant that differs, and the line of it: they carry the batch size
    # on, until they index rows.
    sized: dict[Ref, str] = {}
    equations: list[Equation] = []
    for one, own in zip(whole.equations, part.equations, strict=True):
        # E3: a gather or slice of rows at such a number reads other rows than the microbatch's.
        start = _INDEXING.get(own.primitive.name)
        if start is not None and has_rows(one.operand_shapes[0], own.operand_shapes[0]):
            for ref in refs(one.operands[start:]):
                if ref in sized:
                    raise BatchError(_describe_index(name, one, sized[ref]))
        operands = _whole_operands(one.operands, own.operands)
        replaced = any(map(_is_replaced, operands, own.operands))
        if replaced or not sized.keys().isdisjoint(refs(one.operands)):
            for result, aval in zip(one.results, own.result_avals, strict=True):
                dtype = getattr(aval, "dtype", None)
                if dtype is not None and jax.dtypes.issubdtype(dtype, np.integer):
                    sized[result] = own.line
        if own.is_same(one, operands):
            equations.append(one)
            continue
        bodies = zip(one.bodies, own.bodies, strict=True)
        equations.append(
            replace(
                own,
                operands=operands,
                results=one.results,
                bodies=tuple(_with_constants(name, a, b) for a, b in bodies),
            )
        )
    outputs = _whole_operands(whole.outputs, part.outputs)
    return FlatProgram(whole.inputs, part.input_avals, tuple(equations), outputs)


def _describe_index(name: str, equation: Equation, line: str) -> str:
    shape = list(equation.operand_shapes[0])
    return bulleted(
        f"{name} cannot be cut into microbatches: the batch size is used as an index.",
        [
            f"{equation.primitive.name} at {equation.line or '?'} reads an array of shape {shape} "
            f"at places that count from the number of its rows ({line or '?'})"
        ],
        "Read each row by what lies beside it: jnp.take_along_axis(x, i[:, None], 1) for "
        "x[jnp.arange(n), i], or jax.vmap of the code for one example.",
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
    return part if has_rows(whole.aval.shape, part.aval.shape) else whole


def _is_replaced(operand: Ref | Const, part: Ref | Const) -> bool:
    """True if an operand is a constant that the part has another value for."""
    if not isinstance(operand, Const) or not isinstance(part, Const):
        return False
    if operand.value is part.value:
        return False
    is_key = jax.dtypes.issubdtype(operand.aval.dtype, jax.dtypes.extended)
    return is_key or not np.array_equal(np.asarray(operand.value), np.asarray(part.value))


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
    equations: list[Equation] = []
    for one, own in zip(whole.equations, tried.equations, strict=True):
        if one is own:
            equations.append(own)
            continue
        # A kernel holds sizes in its jaxpr; a scatter's jaxpr combines two numbers and holds none.
        inner = () if own.bodies else jex.jaxprs_in_params(one.params)
        holds_sizes = any(getattr(v.aval, "shape", ()) for jaxpr in inner for v in jaxpr.invars)
        if holds_sizes and one.operand_shapes != own.operand_shapes:
            raise BatchError(
                f"{own.primitive.name} at {own.line or '?'} holds code of its own, whose sizes on "
                f"{trial.wanted} rows are unknown. Take fewer microbatches, of more rows each."
            )
        bodies = zip(one.bodies, own.bodies, strict=True)
        equations.append(
            replace(
                own,
                params={k: _sized(one.params[k], v, trial) for k, v in own.params.items()},
                operands=_operands(one.operands, own.operands, trial),
                operand_shapes=_sized(one.operand_shapes, own.operand_shapes, trial),
                result_avals=_avals(one.result_avals, own.result_avals, trial),
                bodies=tuple(resize(a, b, trial) for a, b in bodies),
            )
        )
    return FlatProgram(
        tried.inputs,
        _avals(whole.input_avals, tried.input_avals, trial),
        tuple(equations),
        _operands(whole.outputs, tried.outputs, trial),
    )


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
    if _is_size(whole) and _is_size(tried) and whole != tried:
        return trial.size(int(whole), int(tried))
    return tried


def _is_size(value: object) -> TypeGuard[int | np.integer[Any]]:
    """True for a whole number, be it one of NumPy's, as the sizes of `jnp.split` are."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


# -- barriers ----------------------------------------------------------------------------------


def rows_behind_barriers(whole: FlatProgram, part: FlatProgram) -> tuple[FlatProgram, FlatProgram]:
    """Two traces at different batch sizes whose barriers hold back nothing but rows of the batch.

    A weight or a finished sum that went through one with rows would be known only within the
    loop over microbatches, though it is the same in all of them. What is recomputed of rows is as
    much kept apart from the forward pass as before.

        a, b = barrier(x, w)    x has rows, w has none        a = barrier(x), and w read for b
    """
    # The first result of every barrier that holds more than rows, and which of them do.
    places: dict[Ref, tuple[int, ...]] = {}
    for one, own in zip(whole.walk(), part.walk(), strict=True):
        if one.primitive.name == _BARRIER:
            pairs = zip(one.result_avals, own.result_avals, strict=True)
            rows = tuple(i for i, (a, b) in enumerate(pairs) if has_rows(a.shape, b.shape))
            if 0 < len(rows) < len(one.results):
                places[one.results[0]] = rows
    return (_loosen(whole, places), _loosen(part, places)) if places else (whole, part)


def _loosen(program: FlatProgram, places: Mapping[Ref, tuple[int, ...]]) -> FlatProgram:
    """A program in which barriers hold their results at these places alone."""
    names: dict[Ref, Ref | Const] = {}  # a result that is let go -> what the barrier read for it
    equations: list[Equation] = []
    for equation in program.equations:
        bodies = tuple(_loosen(body, places) for body in equation.bodies)
        here = replace(equation, operands=rename(equation.operands, names), bodies=bodies)
        kept = places.get(here.results[0]) if here.results else None
        if kept is not None:
            let_go = [i for i in range(len(here.results)) if i not in kept]
            names.update((here.results[i], here.operands[i]) for i in let_go)
            here = replace(
                here,
                operands=tuple(here.operands[i] for i in kept),
                operand_shapes=tuple(here.operand_shapes[i] for i in kept),
                results=tuple(here.results[i] for i in kept),
                result_avals=tuple(here.result_avals[i] for i in kept),
            )
        equations.append(here)
    return replace(program, equations=tuple(equations), outputs=rename(program.outputs, names))
