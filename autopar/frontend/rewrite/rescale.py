"""A factor taken out of a loop: the loop runs with 1 in its place and its sums are scaled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from autopar.errors import GraphError
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.trace.graph import build
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs, rename
from autopar.ir.batching import Rescale


def rescale(traced: TracedStep, rescales: Sequence[Rescale]) -> TracedStep:
    """The step in which each rescaled value multiplies its accumulators instead of their terms.

    The equations on the ways from the value to the accumulators read 1; whatever else reads an
    accumulator reads it times the value. That these are equal is for the caller to know. Raises
    GraphError where a value is no floating-point scalar, or reaches an accumulator in no way.

        dw = sum over rows of x * (ct * s)        dw' = sum over rows of x * (ct * 1);  dw = dw' * s
    """
    program, fresh = traced.program, traced.program.fresh()
    for rescale in rescales:
        program = _rescaled(program, rescale, fresh)
    again = replace(traced, program=program)
    return replace(again, graph=build(again))


def _rescaled(program: FlatProgram, rescale: Rescale, fresh: Iterator[Ref]) -> FlatProgram:
    value, *sums = (int(name.removeprefix("%")) for name in (rescale.value, *rescale.accumulators))
    types = dict(program.avals())
    aval = types.get(value)
    if aval is None or aval.shape or not jnp.issubdtype(aval.dtype, jnp.inexact):
        shown = "no value of the step" if aval is None else str(aval)
        raise GraphError(
            f"{rescale.value} cannot be taken out of its loop: it is {shown}, no float scalar"
        )
    one = {value: Const(np.ones((), aval.dtype), aval)}
    ways = _between(program.equations, value, sums)
    scaled = {r: next(fresh) for r in sums}
    unmet = set(sums)
    written: list[Equation] = []
    for i, equation in enumerate(program.equations):
        if i not in ways:
            written.append(replace(equation, operands=rename(equation.operands, scaled)))
            continue
        # On the way 1 stands for the value; a sum that is made here is multiplied at once.
        written.append(replace(equation, operands=rename(equation.operands, one)))
        for r in unmet.intersection(equation.results):
            place = Place.beside(equation, fresh)
            written += splice(
                lambda total, factor: total * factor.astype(total.dtype),
                (r, value), (types[r], aval), (scaled[r],), place,
            )  # fmt: skip
        unmet -= set(equation.results)
    if unmet:
        raise GraphError(f"{rescale.value} reaches %{min(unmet)} in no way, so cannot scale it")
    return replace(program, equations=tuple(written), outputs=rename(program.outputs, scaled))


def _between(equations: Sequence[Equation], value: Ref, sums: Collection[Ref]) -> frozenset[int]:
    """The equations that the value reaches and that reach a sum."""
    # 1. Forwards, all that the value reaches.
    reached, after = {value}, set[int]()
    for i, equation in enumerate(equations):
        if not reached.isdisjoint(refs(equation.operands)):
            reached.update(equation.results)
            after.add(i)
    # 2. Backwards from the sums, those of them that reach one: what lies on a way between.
    wanted, found = set(sums), set[int]()
    for i in sorted(after, reverse=True):
        if not wanted.isdisjoint(equations[i].results):
            wanted.update(refs(equations[i].operands))
            found.add(i)
    return frozenset(found)
