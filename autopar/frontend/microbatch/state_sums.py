"""Sums over rows that are added to a value in place, taken apart: state that counts its batch.

    new = state.at[labels].add(1)          every microbatch would add the state itself once
    sum = zeros.at[labels].add(1)          a sum over rows, as any other
    new = state + sum                      once, when all rows are in it

Whole numbers are the same; floating-point ones are added in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count

from jax import lax

from autopar.frontend.microbatch.alignment import has_rows
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref
from autopar.rules import primitive


def split_state_sums(whole: FlatProgram, part: FlatProgram) -> tuple[FlatProgram, FlatProgram]:
    """Take sums over rows apart from the values that they are added to, in both traces alike."""
    chosen = frozenset(_state_sums(whole, part))
    if not chosen:
        return whole, part
    first = max(next(program.fresh()) for program in (whole, part))
    return _rewrite(whole, chosen, count(first)), _rewrite(part, chosen, count(first))


def _state_sums(whole: FlatProgram, part: FlatProgram) -> Iterator[Ref]:
    """The results of equations that add rows to a value without rows that is not zero."""
    zeros: set[Ref] = set()
    for one, own in zip(whole.equations, part.equations, strict=True):
        row = primitive(one.primitive.name)
        if row.keeps_zero and all(_is_zero(o, zeros) for o in one.operands):
            zeros.update(one.results)
        if not row.adds or _is_zero(one.operands[0], zeros):
            continue
        shapes = list(zip(one.operand_shapes, own.operand_shapes, strict=True))
        if not has_rows(*shapes[0]) and any(has_rows(*pair) for pair in shapes[1:]):
            yield one.results[0]


def _is_zero(operand: Ref | Const, zeros: set[Ref]) -> bool:
    if isinstance(operand, Const):
        return not operand.aval.shape and not operand.value
    return operand in zeros


def _rewrite(program: FlatProgram, chosen: frozenset[Ref], fresh: Iterator[Ref]) -> FlatProgram:
    equations: list[Equation] = []
    for adding in program.equations:
        if not adding.results or adding.results[0] not in chosen:
            equations.append(adding)
            continue
        # zeros; the sum over rows alone; its addition to the value
        aval, place = adding.result_avals[0], Place.beside(adding, fresh)
        zeros, total = next(fresh), next(fresh)
        full = partial(lax.full, aval.shape, 0, aval.dtype)
        equations += splice(full, (), (), (zeros,), place)
        operands = (zeros, *adding.operands[1:])
        equations.append(replace(adding, operands=operands, results=(total,)))
        summed = (adding.operands[0], total)
        equations += splice(lax.add, summed, (aval, aval), adding.results, place)
    return replace(program, equations=tuple(equations))
