"""A factor taken out of a loop: the loop runs with 1 in its place and its sums are scaled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import GraphError
from autopar.frontend.rewrite.splice import Place, rename, splice
from autopar.frontend.trace.graph import build
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.batching import Rescale


def rescale(traced: TracedStep, rescales: Sequence[Rescale]) -> TracedStep:
    """The step in which each rescaled value multiplies its accumulators instead of their terms.

    The equations on the ways from the value to the accumulators read 1; whatever else reads an
    accumulator reads it times the value. That these are equal is for the caller to know. Raises
    GraphError where a value is no floating-point scalar, or reaches an accumulator in no way.
    """
    program, fresh = traced.program, traced.program.fresh()
    for rescale in rescales:
        program = _rescaled(program, rescale, fresh)
    again = replace(traced, program=program)
    return replace(again, graph=build(again))


def _rescaled(program: FlatProgram, rescale: Rescale, fresh: Iterator[Ref]) -> FlatProgram:
    value, sums = _ref(rescale.value), tuple(map(_ref, rescale.accumulators))
    types = dict(program.avals())
    one = _one(rescale.value, types.get(value))
    ways = _between(program.equations, value, frozenset(sums))
    scaled = {r: next(fresh) for r in sums}
    unmet = set(sums)
    written: list[Equation] = []
    for i, equation in enumerate(program.equations):
        operands = equation.operands
        operands = _without(operands, value, one) if i in ways else rename(operands, scaled)
        written.append(replace(equation, operands=operands))
        for r in unmet.intersection(equation.results) if i in ways else ():
            place = Place.beside(equation, fresh)
            written += splice(_times, (r, value), (types[r], types[value]), (scaled[r],), place)
        unmet -= set(equation.results) if i in ways else set()
    if unmet:
        raise GraphError(f"{rescale.value} reaches %{min(unmet)} in no way, so cannot scale it")
    return replace(program, equations=tuple(written), outputs=rename(program.outputs, scaled))


def _ref(name: str) -> Ref:
    return int(name.removeprefix("%"))


def _one(name: str, aval: Any) -> Const:
    if aval is None or aval.shape or not jnp.issubdtype(aval.dtype, jnp.inexact):
        shown = "no value of the step" if aval is None else str(aval)
        raise GraphError(f"{name} cannot be taken out of its loop: it is {shown}, no float scalar")
    return Const(np.ones((), aval.dtype), aval)


def _between(equations: Sequence[Equation], value: Ref, sums: Collection[Ref]) -> frozenset[int]:
    """The equations that the value reaches and that reach a sum."""
    reached, after = {value}, set[int]()
    for i, equation in enumerate(equations):
        if not reached.isdisjoint(refs(equation.operands)):
            reached.update(equation.results)
            after.add(i)
    wanted, found = set(sums), set[int]()
    for i in sorted(after, reverse=True):
        if not wanted.isdisjoint(equations[i].results):
            wanted.update(refs(equations[i].operands))
            found.add(i)
    return frozenset(found)


def _without(operands: Sequence[Ref | Const], value: Ref, one: Const) -> tuple[Ref | Const, ...]:
    return tuple(one if isinstance(o, int) and o == value else o for o in operands)


def _times(total: jax.Array, factor: jax.Array) -> jax.Array:
    return total * factor.astype(total.dtype)
