"""In which part of which stage every op of a loop runs: F, B, or B split into I and W."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from autopar.ir.batching import When
from autopar.ir.program import PartKind
from autopar.passes.lower.gradients import weight_gradients
from autopar.passes.lower.outline import NOWHERE, Outline, grid_of
from autopar.passes.lower.seats import Seat


@dataclass(frozen=True)
class Place:
    """The stage of a loop op, and whether it is of the backward pass."""

    stage: int
    is_backward: bool


@dataclass(frozen=True)
class LoopSeats:
    """The ops of every part that runs in a loop, and those that it runs again, both in order."""

    own: Mapping[Seat, Sequence[int]]
    again: Mapping[Seat, Sequence[int]]


def loop_seats(outline: Outline) -> LoopSeats:
    """Every op of every loop in its part."""
    own: dict[Seat, list[int]] = {}
    splits = grid_of(outline.stages, outline.batching.microbatches).splits_backward
    places = loop_places(outline)
    for loop, here in enumerate(places):
        weights = weight_gradients(outline, here) if splits else frozenset[int]()
        for i, place in here.items():
            seat = _seat(outline, loop, place, splits, i in weights)
            own.setdefault(seat, []).append(i)
    return LoopSeats(own, dict(_recomputed(outline, places, own)))


def _seat(outline: Outline, loop: int, place: Place, splits: bool, is_weight: bool) -> Seat:
    kind = PartKind.FORWARD
    if place.is_backward:
        kind = PartKind.BACKWARD
        if splits:
            kind = PartKind.WEIGHT_GRADIENT if is_weight else PartKind.INPUT_GRADIENT
    return Seat(kind, place.stage, outline.submesh(place.stage), loop)


# -- stages ----------------------------------------------------------------------------------


def loop_places(outline: Outline) -> tuple[dict[int, Place], ...]:
    """For each loop where its ops run, in the order of the ops.

    A forward op runs no earlier in the pipeline than what it reads, a backward op no later: an op
    whose home says otherwise moves. What has no home goes to where its operands are.
    """
    return tuple(_Loop(outline, loop).places() for loop in range(outline.batching.loops))


class _Loop:
    """One loop of the step."""

    def __init__(self, outline: Outline, loop: int) -> None:
        self._outline, self._loop = outline, loop
        self._members = [i for i in outline.placed if self._is_member(i)]
        self._wished = self._wishes()
        self._places: dict[int, Place] = {}

    def places(self) -> dict[int, Place]:
        for i in self._members:
            self._places[i] = self._place(i)
        return self._places

    def _is_member(self, i: int) -> bool:
        return self._outline.when(i) is When.LOOP and self._loop in self._outline.loops(i)

    def _wishes(self) -> dict[int, int]:
        """Each op's own stage, or the last of those that read it."""
        found: dict[int, int] = {}
        for i in reversed(self._members):
            home = self._outline.home[i]
            readers = (found[j] for j in self._outline.readers[i] if j in found)
            found[i] = home if home != NOWHERE else max(readers, default=NOWHERE)
        return found

    def _place(self, i: int) -> Place:
        read = [self._places[j] for j in self._read(i)]
        forward = [p.stage for p in read if not p.is_backward]
        backward = [p.stage for p in read if p.is_backward]
        home, last = self._outline.home[i], len(self._outline.stages.stages) - 1
        if backward or self._begins_backward(i):
            wished = home if home != NOWHERE or backward else self._wished[i]
            return Place(min([wished if wished != NOWHERE else last, *backward]), True)
        if home == NOWHERE and not forward:
            home = self._stage_of_inputs(i)
        return Place(max([home, *forward]), False)

    def _read(self, i: int) -> Iterator[int]:
        outline = self._outline
        makers = (outline.maker[n] for n in outline.reads[i] if n in outline.maker)
        return (j for j in makers if j in self._places)

    def _begins_backward(self, i: int) -> bool:
        if self._outline.batching.barrier:
            return self._loop > 0
        return self._outline.ops[i].origin.region == "backward"

    def _stage_of_inputs(self, i: int) -> int:
        names = (n for n in self._outline.reads[i] if n in self._outline.given)
        return max(map(self._outline.input_stage, names), default=0)


# -- recomputation ---------------------------------------------------------------------------


def _recomputed(
    outline: Outline, places: tuple[dict[int, Place], ...], seats: Mapping[Seat, Sequence[int]]
) -> Iterator[tuple[Seat, Sequence[int]]]:
    """The forward ops that the first backward part of a stage runs again.

    They are what any backward part of the stage reads of its forward part, down to what comes
    into the stage or crosses one of its cuts; so a split backward recomputes once, and keeps for
    W what W reads.
    """
    readers: dict[tuple[int, int], list[Seat]] = {}
    for seat in seats:
        if seat.kind is not PartKind.FORWARD and outline.stages.stages[seat.stage].recompute:
            readers.setdefault((seat.loop, seat.stage), []).append(seat)
    for (loop, stage), found in readers.items():
        first = min(found, key=lambda seat: seat.order)
        wanted = [i for seat in found for i in seats[seat]]
        earliest = 0 if outline.batching.barrier else loop
        again = {
            i
            for here in places[earliest : loop + 1]
            for i, place in here.items()
            if place.stage == stage and not place.is_backward
        }
        kept = _crossing(outline, again, outline.stages.stages[stage].cuts)
        yield first, sorted(_closure(outline, again, kept, wanted))


def _crossing(outline: Outline, ops: Set[int], cuts: Sequence[int]) -> set[str]:
    """What ops before a cut make and ops from it on read; `cuts` count the graph's ops."""
    found: set[str] = set()
    for i in ops:
        made = (n for n in outline.reads[i] if outline.maker.get(n) in ops)
        found.update(n for n in made if any(outline.maker[n] < cut <= i for cut in cuts))
    return found


def _closure(outline: Outline, again: Set[int], kept: Set[str], wanted: list[int]) -> set[int]:
    found: set[int] = set()
    while wanted:
        reads = (n for n in outline.reads[wanted.pop()] if n in outline.maker and n not in kept)
        # An accumulator is read as the sum of an earlier loop.
        summed = outline.batching.accumulator_of
        makers = {outline.maker[n] for n in reads if n not in summed} & again - found
        found |= makers
        wanted += sorted(makers)
    return found
