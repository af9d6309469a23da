"""Chosen equations as a program of their own, to be compiled by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import GraphError
from autopar.frontend.traced import FlatProgram, refs


def part_program(
    program: FlatProgram,
    equations: Sequence[int],
    inputs: Sequence[str],
    outputs: Sequence[str | int],
) -> FlatProgram:
    """The program of some equations, by position, from values named "%12" to others.

    An output that the whole program returns as a literal is named by its position among the
    program's outputs. Raises GraphError where an equation or an output reads a value that is
    neither an input nor made by the equations before it.
    """
    types = dict(program.avals())
    given = tuple(int(name.removeprefix("%")) for name in inputs)
    unknown = [n for n, r in zip(inputs, given, strict=True) if r not in types]
    if unknown:
        raise GraphError(f"the program has no value {', '.join(unknown)} to give to a part of it")
    chosen = tuple(program.equations[i] for i in sorted(equations))
    made = set(given)
    for equation in chosen:
        lost = [r for r in refs(equation.operands) if r not in made]
        if lost:
            kind, line = equation.primitive.name, equation.line or "?"
            raise GraphError(f"{kind} ({line}) in a part reads %{lost[0]}, which it is not given")
        made.update(equation.results)
    returned = tuple(
        program.outputs[o] if isinstance(o, int) else int(o.removeprefix("%")) for o in outputs
    )
    lost = [r for r in refs(returned) if r not in made]
    if lost:
        raise GraphError(f"a part returns %{lost[0]}, which it neither makes nor is given")
    return FlatProgram(given, tuple(types[r] for r in given), chosen, returned)
