"""Which parts are the same program: what each computes, its values numbered as they come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from autopar.frontend.plain_data import type_of
from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.ir.spmd import Block, Fence, Instruction, Loop, Move, Run
from autopar.runtime.parts import PartSource

_Key = Hashable
# Where a jaxpr stands among the parameters it is read as the body that was flattened from it.
_FLATTENED = frozenset({"jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches"})


def part_key(source: PartSource) -> _Key:
    """What two parts share if, and only if, one compiled program will do for both.

    Names of values, source lines and the stage are left out. What cannot be read, such as a
    callback, is only like itself.
    """
    part, listing = source.program.part, source.program.listing
    numbers = _Numbers()
    return (
        source.platform,
        source.mesh,
        source.inputs,
        source.outputs,
        source.donated,
        source.has_token,
        tuple(
            (a.combiner, a.dtype, i) for a, i in zip(part.accumulators, source.places, strict=True)
        ),
        _program_key(source.flat, numbers),
        _block_key(listing.block, numbers),
        listing.input_shardings,
        listing.output_shardings,
    )


def alike_parts(sources: Iterable[PartSource]) -> tuple[tuple[PartSource, ...], ...]:
    """Parts that are one program together, in the order of the first of each."""
    alike: dict[Hashable, list[PartSource]] = {}
    for source in sources:
        alike.setdefault(part_key(source), []).append(source)
    return tuple(map(tuple, alike.values()))


class _Numbers:
    """Values by the order in which they are first met."""

    def __init__(self) -> None:
        self._seen: dict[int | str, int] = {}

    def of(self, names: Iterable[int | str | Const | None]) -> tuple[_Key, ...]:
        """Names as numbers; literals as what they are."""
        return tuple(
            _const_key(n) if isinstance(n, Const) else n if n is None else self._number(n)
            for n in names
        )

    def _number(self, name: int | str) -> int:
        return self._seen.setdefault(name, len(self._seen))


def _program_key(program: FlatProgram, numbers: _Numbers) -> _Key:
    return (
        numbers.of(program.inputs),
        tuple(map(type_of, program.input_avals)),
        tuple(_equation_key(e, numbers) for e in program.equations),
        numbers.of(program.outputs),
    )


def _equation_key(equation: Equation, numbers: _Numbers) -> _Key:
    skipped = _FLATTENED if equation.bodies else frozenset[str]()
    return (
        equation.primitive.name,
        tuple(
            (name, _param_key(value))
            for name, value in sorted(equation.params.items())
            if name not in skipped
        ),
        numbers.of(equation.operands),
        numbers.of(equation.results),
        tuple(map(type_of, equation.result_avals)),
        tuple(_program_key(body, numbers) for body in equation.bodies),
    )


def _param_key(value: Any) -> _Key:
    if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        consts = value.consts if isinstance(value, jex.ClosedJaxpr) else ()
        return str(value), tuple(map(_array_key, consts))
    if isinstance(value, np.ndarray | jax.Array):
        return _array_key(value)
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_param_key, value))
    if isinstance(value, dict):
        return tuple((k, _param_key(v)) for k, v in sorted(value.items()))
    try:
        # A float is not equal to the whole number of its size here, as it is in a set.
        hash(value)
        return type(value).__name__, value
    except TypeError:
        return id(value)


def _const_key(const: Const) -> _Key:
    return type_of(const.aval), _array_key(const.value)


def _array_key(value: Any) -> _Key:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return str(value.dtype), _array_key(jax.random.key_data(value))
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def _block_key(block: Block, numbers: _Numbers) -> _Key:
    return (
        numbers.of(block.inputs),
        tuple(_step_key(s, numbers) for s in block.instructions),
        numbers.of(block.outputs),
    )


def _step_key(step: Instruction, numbers: _Numbers) -> _Key:
    if isinstance(step, Run):
        names = numbers.of(step.operands), numbers.of(step.results)
        return "run", step.equation, names, step.operand_shardings, step.result_shardings
    if isinstance(step, Move):
        moved = numbers.of((step.source, step.result))
        value = step.value.shape, step.value.dtype
        return "move", moved, value, step.before, step.after, step.steps, step.combiner, step.repeat
    if isinstance(step, Fence):
        return "fence", numbers.of(step.sources), numbers.of(step.results), step.tied
    return _loop_key(step, numbers)


def _loop_key(loop: Loop, numbers: _Numbers) -> _Key:
    names = numbers.of(loop.operands), numbers.of(loop.results)
    bodies = tuple(_block_key(b, numbers) for b in loop.bodies)
    return "loop", loop.equation, names, loop.result_shardings, bodies, loop.runs
