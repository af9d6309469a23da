"""Opens remat equations, so that a backward pass can be cut within what it recomputes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jax import lax

from autopar.frontend.microbatch.alignment import has_rows
from autopar.frontend.trace.graph import build
from autopar.frontend.rewrite.splice import renamed
from autopar.frontend.rewrite.splice import Place, spliced
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep

_REMAT = ("remat2", "checkpoint")
_BARRIER = "optimization_barrier"


def open_remat(traced: TracedStep) -> TracedStep:
    """The step with the bodies of its remat equations in line, those within loops too.

    Where a body recomputes for the backward pass, all that it reads goes through one
    `optimization_barrier` first, as it does where JAX lowers remat: else XLA would merge the
    recomputation with what the forward pass made. Fences with nothing in them become barriers.
    """
    program = opened(traced.program)
    if program is traced.program:
        return traced
    again = replace(traced, program=program)
    return replace(again, graph=build(again))


def opened(program: FlatProgram) -> FlatProgram:
    """The program of `open_remat`."""
    if not any(e.primitive.name in _REMAT for e in program.walk()):
        return program
    return _Opener(program.fresh()).program(program)


def rows_behind_barriers(whole: FlatProgram, part: FlatProgram) -> tuple[FlatProgram, FlatProgram]:
    """Two traces at different batch sizes whose barriers hold back nothing but rows of the batch.

    A weight or a finished sum that went through one with rows would be known only within the
    loop over microbatches, though it is the same in all of them. What is recomputed of rows is as
    much kept apart from the forward pass as before.
    """
    places = dict(_places_of_rows(whole, part))
    return _loosened(whole, places), _loosened(part, places)


def _places_of_rows(whole: FlatProgram, part: FlatProgram) -> Iterator[tuple[Ref, tuple[int, ...]]]:
    """The first result of every barrier that holds more than rows, and which of them do."""
    for one, own in zip(whole.walk(), part.walk(), strict=True):
        if one.primitive.name == _BARRIER:
            pairs = zip(one.result_avals, own.result_avals, strict=True)
            places = tuple(i for i, (a, b) in enumerate(pairs) if has_rows(a.shape, b.shape))
            if 0 < len(places) < len(one.results):
                yield one.results[0], places


def _loosened(program: FlatProgram, places: Mapping[Ref, tuple[int, ...]]) -> FlatProgram:
    """A program in which barriers hold their results at these places alone."""
    names: dict[Ref, Ref | Const] = {}
    equations: list[Equation] = []
    for equation in program.equations:
        bodies = tuple(_loosened(body, places) for body in equation.bodies)
        here = replace(equation, operands=_read(equation.operands, names), bodies=bodies)
        held = places.get(here.results[0]) if here.results else None
        if held is not None:
            names.update(zip(here.results, here.operands, strict=True))
            here = _held(here, held)
            for result in here.results:
                del names[result]
        equations.append(here)
    return replace(program, equations=tuple(equations), outputs=_read(program.outputs, names))


def _held(barrier: Equation, places: Sequence[int]) -> Equation:
    return replace(
        barrier,
        operands=tuple(barrier.operands[i] for i in places),
        operand_shapes=tuple(barrier.operand_shapes[i] for i in places),
        results=tuple(barrier.results[i] for i in places),
        result_avals=tuple(barrier.result_avals[i] for i in places),
    )


class _Opener:
    """Numbers what it adds from `fresh`."""

    def __init__(self, fresh: Iterator[Ref]) -> None:
        self._fresh = fresh

    def program(self, program: FlatProgram) -> FlatProgram:
        """A program with nothing left to open, whose inputs are the same."""
        names: dict[Ref, Ref | Const] = {}
        equations = tuple(self._equations(program, names))
        return replace(program, equations=equations, outputs=_read(program.outputs, names))

    def _equations(self, program: FlatProgram, names: dict[Ref, Ref | Const]) -> Iterator[Equation]:
        """The equations in order; `names` gathers what results of remat are now called."""
        for equation in program.equations:
            here = replace(equation, operands=_read(equation.operands, names))
            if equation.primitive.name in _REMAT:
                yield from self._opened(here, names)
            else:
                yield replace(here, bodies=tuple(map(self.program, here.bodies)))

    def _opened(self, remat: Equation, names: dict[Ref, Ref | Const]) -> Iterator[Equation]:
        body = remat.bodies[0]
        pairs = zip(remat.operands, body.input_avals, strict=True)
        types = {o: aval for o, aval in pairs if isinstance(o, int)}
        behind: dict[Ref, Ref] = {}
        if recomputes(remat) and types:
            behind = {r: next(self._fresh) for r in types}
            place = Place.beside(remat, self._fresh)
            values, fenced = tuple(behind), tuple(behind.values())
            yield from spliced(_barrier, values, tuple(types.values()), fenced, place)
        names.update(zip(body.inputs, renamed(remat.operands, behind), strict=True))
        yield from self._equations(body, names)
        names.update(zip(remat.results, _read(body.outputs, names), strict=True))


def recomputes(remat: Equation) -> bool:
    """Whether a remat equation makes forward values again that must not be taken from before."""
    return "transpose(" in remat.name_stack and bool(remat.params.get("prevent_cse", True))


def _read(
    operands: Sequence[Ref | Const], names: Mapping[Ref, Ref | Const]
) -> tuple[Ref | Const, ...]:
    return tuple(names.get(o, o) if isinstance(o, int) else o for o in operands)


def _barrier(*values: object) -> object:
    return lax.optimization_barrier(values)
