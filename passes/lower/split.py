"""A batched step on its stages becomes parts: graphs that one submesh runs as one program each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import GraphError
from autopar.ir.batching import Accumulator, Batching
from autopar.ir.graph import Graph, Operand
from autopar.ir.program import Part, PartKind
from autopar.ir.stages import StagePlan
from autopar.ir.values import Input
from autopar.passes.lower.links import Makers, literal_seats, made_outputs
from autopar.passes.lower.loops import loop_seats
from autopar.passes.lower.outline import Outline
from autopar.passes.lower.rounds import once_seats
from autopar.passes.lower.seats import Seat


def split(batching: Batching, stages: StagePlan) -> tuple[Part, ...]:
    """Every op of a step in the parts that run it, in the order in which they first run.

    Raises GraphError where the stages do not suit the schedule, or the batching not the stages.
    """
    outline = Outline.of(batching, stages)
    contents = _contents(outline)
    leaving = _leaving(outline, contents)
    parts = [
        _Builder(outline, contents, seat).part(leaving[seat])
        for seat in sorted(contents.ops, key=lambda seat: seat.row)
    ]
    hoist = [_hoist_part(outline, seat) for seat in contents.hoist_seats]
    for part in parts:
        part.graph.verify()
    return (*hoist, *parts)


@dataclass(frozen=True)
class _Contents:
    """What every part runs and passes on, and who makes what."""

    ops: Mapping[Seat, Sequence[int]]
    passed: Mapping[Seat, Sequence[str]]
    accumulators: Mapping[Seat, tuple[Accumulator, ...]]
    makers: Makers
    hoist_seats: tuple[Seat, ...]


def _contents(outline: Outline) -> _Contents:
    loops = loop_seats(outline)
    once = once_seats(outline, loops.own)
    own = {**loops.own, **once.ops, **{s: once.ops.get(s, []) for s in once.passed}}
    own.update((s, own.get(s, [])) for s in literal_seats(outline).values())
    ops = {seat: sorted({*mine, *loops.again.get(seat, ())}) for seat, mine in own.items()}
    summed = {seat: tuple(_accumulators(outline, seat, mine)) for seat, mine in loops.own.items()}
    hoist_seats = _hoist_seats(outline, ops)
    plain: dict[str, list[Seat]] = {}
    for seat in ops:
        added = {a.value for a in summed.get(seat, ())}
        made = [r.name for i in ops[seat] for r in outline.ops[i].results]
        for name in (*made, *once.passed.get(seat, ())):
            if name not in added and name not in outline.hoisted:
                plain.setdefault(name, []).append(seat)
    plain.update((name, list(hoist_seats)) for name in outline.hoisted)
    accumulating = {a.value: seat for seat, found in summed.items() for a in found}
    makers = Makers(outline, plain, accumulating)
    return _Contents(ops, once.passed, summed, makers, hoist_seats)


def _accumulators(outline: Outline, seat: Seat, ops: Iterable[int]) -> Iterator[Accumulator]:
    for i in ops:
        for result in outline.ops[i].results:
            found = outline.batching.accumulator_of.get(result.name)
            if found is not None and found.loop == seat.loop:
                yield found


# -- the hoist -------------------------------------------------------------------------------


def _hoist_seats(outline: Outline, ops: Mapping[Seat, Sequence[int]]) -> tuple[Seat, ...]:
    """The seat of what the whole batch decides: on the submesh that reads it first."""
    readers = [
        seat
        for seat, mine in ops.items()
        if any(not outline.hoisted.isdisjoint(outline.reads[i]) for i in mine)
    ]
    if not readers and outline.hoisted.isdisjoint(map(str, outline.graph.outputs)):
        return ()
    first = min(readers, key=lambda seat: seat.row, default=Seat(PartKind.HOIST, 0, 0))
    return (Seat(PartKind.HOIST, first.stage, first.submesh),)


def _hoist_part(outline: Outline, seat: Seat) -> Part:
    hoist = outline.batching.hoist
    assert hoist is not None
    return Part(seat.kind, seat.stage, seat.submesh, hoist.graph, hoist.equations)


# -- what leaves a part ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaving:
    """What other parts read of one, by name, and the outputs of the step that it makes."""

    names: set[str]
    outputs: list[int]


def _leaving(outline: Outline, contents: _Contents) -> dict[Seat, _Leaving]:
    found = {seat: _Leaving(set(), []) for seat in (*contents.ops, *contents.hoist_seats)}
    for seat, ops in contents.ops.items():
        made = {r.name for i in ops for r in outline.ops[i].results} - outline.hoisted
        read = dict.fromkeys(n for i in ops for n in outline.reads[i] if n not in made)
        for name in (*read, *contents.passed.get(seat, ())):
            if name in outline.given:
                _check_rows(outline, seat, name)
            else:
                found[contents.makers.source(name, seat)].names.add(name)
    for output, seat in literal_seats(outline).items():
        found[seat].outputs.append(output)
    for output in made_outputs(outline):
        found[contents.makers.returned(output)].outputs.append(output)
    return found


def _check_rows(outline: Outline, seat: Seat, name: str) -> None:
    batching = outline.batching
    is_cut = name in batching.rows_of or name == batching.index
    if is_cut and not seat.is_looped and batching.microbatches > 1:
        raise GraphError(
            f"input {name} is cut into {batching.microbatches} microbatches, but read once a step"
        )


# -- one part --------------------------------------------------------------------------------


class _Builder:
    """The graph of one part."""

    def __init__(self, outline: Outline, contents: _Contents, seat: Seat) -> None:
        self._outline, self._contents, self._seat = outline, contents, seat
        self._ops = sorted(self._with_repeated(contents.ops[seat]))
        self._inputs: dict[str, Input] = {}
        self._outputs: list[Operand] = []
        self._places: dict[int, int] = {}  # output of the step -> output of the part

    def part(self, leaving: _Leaving) -> Part:
        """The part, given what is read of it."""
        outline, seat = self._outline, self._seat
        accumulators = self._contents.accumulators.get(seat, ())
        summed = [a.value for a in accumulators]
        donated = self._return(leaving, frozenset(summed))
        self._read()
        ordered = sorted(self._inputs, key=lambda n: outline.input_index.get(n, 1 << 30))
        part = Part(
            seat.kind, seat.stage, seat.submesh,
            Graph("", tuple(self._inputs[n] for n in ordered),
                  tuple(outline.ops[i] for i in self._ops), (*self._outputs, *summed),
                  self._paths(len(summed)), tuple((o, ordered.index(n)) for o, n in donated)),
            tuple(self._ops), seat.loop, seat.round, accumulators,
        )  # fmt: skip
        return replace(part, graph=replace(part.graph, name=f"{outline.graph.name}.{part.name}"))

    def _with_repeated(self, ops: Sequence[int]) -> set[int]:
        outline, found, left = self._outline, set(ops), list(ops)
        while left:
            for name in outline.ops[left.pop()].value_operands():
                j = outline.maker.get(name, -1)
                if j >= 0 and outline.is_repeated[j] and j not in found:
                    found.add(j)
                    left.append(j)
        return found

    def _return(self, leaving: _Leaving, summed: frozenset[str]) -> list[tuple[int, str]]:
        """The outputs: what is read of the part, and what the step returns of it.

        State goes out once more than it is read, as it lies like what it replaces. That comes in
        even if nothing reads it: found are the pairs of both.
        """
        outline, returns = self._outline, dict(self._outline.graph.donated)
        replacing = {
            o: outline.graph.inputs[returns[o]]
            for o in leaving.outputs
            if outline.return_home.get(o) == self._seat.submesh
        }
        given = {o: outline.graph.outputs[o] for o in leaving.outputs}
        others = {n for o, n in given.items() if o not in replacing and isinstance(n, str)}
        wanted = (leaving.names | others) - summed
        made = [r.name for i in self._ops for r in outline.ops[i].results]
        passed = self._contents.passed.get(self._seat, ())
        shared = list(dict.fromkeys(n for n in (*made, *passed) if n in wanted))
        self._outputs = list(shared)
        for output, operand in given.items():
            if isinstance(operand, str) and output not in replacing:
                self._places[output] = shared.index(operand)
            else:
                self._places[output] = len(self._outputs)
                self._outputs.append(operand)
        for state in replacing.values():
            self._inputs[state.value.name] = state
        return [(self._places[o], state.value.name) for o, state in replacing.items()]

    def _read(self) -> None:
        outline = self._outline
        made: set[str] = set()
        for i in self._ops:
            for name in outline.ops[i].value_operands():
                if name not in made:
                    self._take(name)
            made.update(r.name for r in outline.ops[i].results if r.name not in outline.hoisted)
        for name in self._contents.passed.get(self._seat, ()):
            self._take(name)

    def _take(self, name: str) -> None:
        value = self._outline.graph.values[name]
        self._inputs.setdefault(name, self._outline.given.get(name, Input(value)))

    def _paths(self, summed: int) -> tuple[str, ...]:
        paths = self._outline.graph.output_paths
        if not paths or not self._places:
            return ()
        found = [""] * (len(self._outputs) + summed)
        for output, place in self._places.items():
            found[place] = paths[output]
        return tuple(found)
