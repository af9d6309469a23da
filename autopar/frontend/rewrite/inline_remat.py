"""Bodies of remat equations in line, so that a backward pass can be cut within a recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jax import lax

from autopar.frontend.rewrite.splice import Place, rename, splice
from autopar.frontend.trace.graph import build
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep

_REMAT = ("remat2", "checkpoint")
_BARRIER = "optimization_barrier"


def inline_remat(traced: TracedStep) -> TracedStep:
    """The step with the bodies of its remat equations in line, those within loops too.

    Where a body recomputes for the backward pass, all that it reads goes through one
    `optimization_barrier` first, as it does where JAX lowers remat: else XLA would merge the
    recomputation with what the forward pass made. Fences with nothing in them become barriers.
    """
    program = inline_remats(traced.program)
    if program is traced.program:
        return traced
    again = replace(traced, program=program)
    return replace(again, graph=build(again))


def inline_remats(program: FlatProgram) -> FlatProgram:
    """The program of `inline_remat`."""
    if not any(e.primitive.name in _REMAT for e in program.walk()):
        return program
    return _Opener(program.fresh()).program(program)


class _Opener:
    """Numbers what it adds from `fresh`."""

    def __init__(self, fresh: Iterator[Ref]) -> None:
        self._fresh = fresh

    def program(self, program: FlatProgram) -> FlatProgram:
        """A program with nothing left to open, whose inputs are the same."""
        names: dict[Ref, Ref | Const] = {}
        equations = tuple(self._equations(program, names))
        return replace(program, equations=equations, outputs=rename(program.outputs, names))

    def _equations(self, program: FlatProgram, names: dict[Ref, Ref | Const]) -> Iterator[Equation]:
        """The equations in order; `names` gathers what results of remat are now called."""
        for equation in program.equations:
            here = replace(equation, operands=rename(equation.operands, names))
            if equation.primitive.name not in _REMAT:
                yield replace(here, bodies=tuple(map(self.program, here.bodies)))
                continue
            body = here.bodies[0]
            pairs = zip(here.operands, body.input_avals, strict=True)
            types = {o: aval for o, aval in pairs if isinstance(o, int)}
            # r = remat(f)(a)  ->  b = barrier(a); r = f(b)      where it recomputes
            behind: dict[Ref, Ref] = {}
            if recomputes(here) and types:
                behind = {r: next(self._fresh) for r in types}
                yield from splice(
                    lambda *values: lax.optimization_barrier(values),
                    tuple(behind), tuple(types.values()), tuple(behind.values()),
                    Place.beside(here, self._fresh),
                )  # fmt: skip
            names.update(zip(body.inputs, rename(here.operands, behind), strict=True))
            yield from self._equations(body, names)
            names.update(zip(here.results, rename(body.outputs, names), strict=True))


def recomputes(remat: Equation) -> bool:
    """True if a remat equation makes forward values again that must not be taken from before."""
    return "transpose(" in remat.name_stack and bool(remat.params.get("prevent_cse", True))
