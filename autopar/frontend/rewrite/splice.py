"""New equations in a sealed program: traced from a small function, or copies of others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.frontend.trace.inline import flatten
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, refs, rename


@dataclass(frozen=True)
class Place:
    """The place of new equations: their name stack, line and numbers."""

    name_stack: str
    line: str
    fresh: Iterator[Ref]

    @classmethod
    def beside(cls, equation: Equation, fresh: Iterator[Ref]) -> Place:
        """The place of an equation."""
        return cls(equation.name_stack, equation.line, fresh)


def splice(
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
    # The traced program's own numbers become those of the program that it is written into.
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


# -- copies of equations --------------------------------------------------------------------------


# The name stack of what is repeated: backward, and in the module that it was first made in.
AGAIN = "transpose(rematted_computation)"

Makers = Mapping[Ref, tuple[int, Equation]]  # value -> the equation that makes it, its position


def makers_of(equations: Iterable[Equation], chosen: Collection[Ref]) -> Makers:
    """Who makes the chosen values; what has side effects is never repeated."""
    return {
        r: (i, e)
        for i, e in enumerate(equations)
        if not e.has_effects
        for r in e.results
        if r in chosen
    }


def steps_to(wanted: Iterable[Ref], makers: Makers, made: Collection[Ref]) -> list[Equation]:
    """The equations to repeat, in their order, for those of `wanted` that are not yet made."""
    # Backwards from the wanted values, through all that can be made and has not been.
    found: dict[int, Equation] = {}
    unmade = [r for r in wanted if r in makers and r not in made]
    while unmade:
        at, equation = makers[unmade.pop()]
        if at not in found:
            found[at] = equation
            unmade += [r for r in refs(equation.operands) if r in makers and r not in made]
    return [found[at] for at in sorted(found)]


def repeat(equation: Equation, operands: tuple[Ref | Const, ...], fresh: Iterator[Ref]) -> Equation:
    """A copy that reads `operands` in place of what the first one read; all it makes is new."""
    return replace(
        equation,
        operands=operands,
        results=tuple(next(fresh) for _ in equation.results),
        bodies=tuple(_copy(body, fresh) for body in equation.bodies),
        name_stack=f"{AGAIN}/{equation.name_stack}",
    )


def _copy(program: FlatProgram, fresh: Iterator[Ref]) -> FlatProgram:
    inputs = tuple(next(fresh) for _ in program.inputs)
    names = dict(zip(program.inputs, inputs, strict=True))
    equations: list[Equation] = []
    for equation in program.equations:
        copy = repeat(equation, rename(equation.operands, names), fresh)
        names.update(zip(equation.results, copy.results, strict=True))
        equations.append(copy)
    outputs = rename(program.outputs, names)
    return FlatProgram(inputs, program.input_avals, tuple(equations), outputs)
