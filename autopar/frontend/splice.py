"""Writes equations of its own into a sealed program, by tracing a small function of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.frontend.inline import flatten
from autopar.frontend.traced import Const, Equation, Ref


@dataclass(frozen=True)
class Place:
    """Where new equations stand: what they are named and numbered by."""

    name_stack: str
    line: str
    fresh: Iterator[Ref]

    @classmethod
    def beside(cls, equation: Equation, fresh: Iterator[Ref]) -> Place:
        """The place of an equation."""
        return cls(equation.name_stack, equation.line, fresh)


def spliced(
    fun: Callable[..., Any],
    operands: Sequence[Ref | Const],
    avals: Sequence[Any],
    results: Sequence[Ref],
    place: Place,
) -> tuple[Equation, ...]:
    """The equations by which `fun` makes `results` from `operands`, which have types `avals`.

    Every result must be made by an equation of its own: a function that returns what it is given,
    or closes over arrays, has no such form.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    program, _ = flatten(jax.make_jaxpr(fun)(*shapes))
    names: dict[Ref, Ref | Const] = dict(zip(program.inputs, operands, strict=True))
    made = dict(zip(program.outputs, results, strict=True))
    written: list[Equation] = []
    for equation in program.equations:
        own = tuple(made[r] if r in made else next(place.fresh) for r in equation.results)
        names.update(zip(equation.results, own, strict=True))
        read = tuple(names[o] if isinstance(o, int) else o for o in equation.operands)
        written.append(
            replace(
                equation,
                operands=read,
                results=own,
                name_stack=place.name_stack,
                line=place.line,
            )
        )
    return tuple(written)
