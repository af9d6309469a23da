"""Where and in which round runs what runs once: setup, what joins loops, and the update.

An op runs on the submesh of its home. One with no home runs on every submesh that reads it, if
what it needs of others is a few scalars, as in a global norm; else where most of its bytes are.
All scalars that cross go at once, between two rounds of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.batching import When
from autopar.ir.program import PartKind
from autopar.passes.lower.outline import NOWHERE, Outline
from autopar.passes.lower.seats import Seat

SETUP = -1  # the segment before the first loop; segment k follows loop k
# What crosses for an op that is computed on several submeshes: this many bytes and values.
_FEW_BYTES, _FEW_VALUES = 4096, 64


@dataclass
class OnceSeats:
    """The ops of every part that runs once, and what it only passes on.

    A value that is passed on enters and leaves a part, and on the way stops being a partial sum:
    an accumulator that is returned or sent, an input that is returned as something else.
    """

    ops: dict[Seat, list[int]] = field(default_factory=dict[Seat, list[int]])
    passed: dict[Seat, list[str]] = field(default_factory=dict[Seat, list[str]])


def once_seats(outline: Outline, loops: Mapping[Seat, Sequence[int]]) -> OnceSeats:
    """Every op that runs once in its parts."""
    found = OnceSeats()
    segments = _segments(outline)
    spread = _Spread(outline, loops, segments)
    for segment in sorted({*segments.values(), *spread.passed}):
        members = [i for i in sorted(segments) if segments[i] == segment]
        rounds = _rounds(outline, spread, members, segment)
        for (i, submesh), number in sorted(rounds.items()):
            found.ops.setdefault(_seat(outline, segment, submesh, number), []).append(i)
        for name, submesh in spread.passed.get(segment, {}).items():
            found.passed.setdefault(_seat(outline, segment, submesh, 0), []).append(name)
    return found


def _seat(outline: Outline, segment: int, submesh: int, number: int) -> Seat:
    kind = PartKind.SETUP if segment == SETUP else PartKind.UPDATE
    return Seat(kind, outline.first_stage[submesh], submesh, max(segment, 0), number)


def _segments(outline: Outline) -> dict[int, int]:
    """Between which loops each op that runs once does so."""
    found: dict[int, int] = {}
    last = outline.batching.loops - 1
    for i in reversed(outline.placed):
        when = outline.when(i)
        if when is When.ONCE:
            found[i] = outline.loops(i)[0]
        elif when is When.FREE and outline.loop_reads[i]:
            found[i] = SETUP
        elif when is When.FREE:
            found[i] = min((found[j] for j in outline.readers[i] if j in found), default=last)
    return found


class _Spread:
    """The submeshes on which every op that runs once does so."""

    def __init__(
        self, outline: Outline, loops: Mapping[Seat, Sequence[int]], segments: Mapping[int, int]
    ) -> None:
        self.outline, self._segments = outline, segments
        self._accumulated = {
            name: seat.submesh
            for seat, ops in loops.items()
            for i in ops
            for r in outline.ops[i].results
            if (name := r.name) in outline.batching.accumulator_of
            and outline.batching.accumulator_of[name].loop == seat.loop
        }
        self._looped = {
            r.name: s.submesh
            for s, ops in loops.items()
            for i in ops
            for r in outline.ops[i].results
        }
        self._needs: dict[int, set[int]] = {i: set() for i in segments}
        self._crossing: set[str] = set()  # accumulators that are read on other submeshes
        self._spot: dict[int, int] = {}
        self._weight: dict[int, tuple[int, int]] = {}
        for i in sorted(segments):
            self._settle(i)
        self._ask_for_loops(loops)
        self._ask_for_outputs()
        self.on = self._place()
        self.passed = self._passes()

    # -- who could run it ------------------------------------------------------------------

    def _settle(self, i: int) -> None:
        """Where an op would run if it ran once, and what it needs if it runs everywhere."""
        outline, home = self.outline, self.outline.home[i]
        here: dict[int, int] = {}
        nbytes = count = 0
        for name in outline.reads[i]:
            size, spot = outline.graph.values[name].nbytes, self._spot_of(name)
            if spot >= 0:
                here[spot] = here.get(spot, 0) + size
            more = self._weight.get(outline.maker.get(name, -1), (size, 1) if spot >= 0 else (0, 0))
            nbytes, count = nbytes + more[0], count + more[1]
        heaviest = min(here, key=lambda submesh: (-here[submesh], submesh), default=-1)
        self._spot[i] = outline.submesh(home) if home != NOWHERE else heaviest
        made = sum(r.nbytes for r in outline.ops[i].results)
        few = nbytes <= max(_FEW_BYTES, made) and count <= _FEW_VALUES
        is_free = outline.when(i) is When.FREE and not nbytes
        if made and (is_free or (home == NOWHERE and few)):
            self._weight[i] = (nbytes, count)

    def _spot_of(self, name: str) -> int:
        """The submesh of a value; -1 for what is anywhere."""
        outline = self.outline
        j = outline.maker.get(name, -1)
        if name in outline.given:
            return outline.state_home(name)
        if j < 0:
            return -1
        return self._spot[j] if j in self._spot else self._looped.get(name, -1)

    # -- who asks for it -------------------------------------------------------------------

    def _ask_for_loops(self, loops: Mapping[Seat, Sequence[int]]) -> None:
        for seat, ops in loops.items():
            for i in ops:
                self._ask(i, seat.submesh)
                for name in self.outline.reads[i]:
                    owner = self.outline.batching.accumulator_of.get(name)
                    if owner is not None and owner.loop < seat.loop:
                        self._crossing.add(name)

    def _ask_for_outputs(self) -> None:
        outline = self.outline
        for o, name in enumerate(outline.graph.outputs):
            if isinstance(name, str):
                self._need(name, outline.return_home.get(o, -1))

    def _ask(self, i: int, submesh: int) -> None:
        for name in self.outline.reads[i]:
            self._need(name, submesh)

    def _need(self, name: str, submesh: int) -> None:
        j = self.outline.maker.get(name, -1)
        if j in self._needs and submesh >= 0:
            self._needs[j].add(submesh)
        if self._accumulated.get(name, submesh) != submesh:
            self._crossing.add(name)

    def _place(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for i in sorted(self._segments, reverse=True):
            everywhere = self._needs[i] if i in self._weight else set[int]()
            found[i] = tuple(sorted(everywhere)) or (max(self._spot[i], 0),)
            for submesh in found[i]:
                self._ask(i, submesh)
        return found

    # -- what is only passed on ------------------------------------------------------------

    def _passes(self) -> dict[int, dict[str, int]]:
        """For each segment, what is passed on, and on which submesh."""
        outline, found = self.outline, dict[int, dict[str, int]]()
        for name, submesh in self._accumulated.items():
            if name in self._crossing or name in outline.graph.outputs:
                found.setdefault(self.segment_of(name), {})[name] = submesh
        last = outline.batching.loops - 1
        for o, output in enumerate(outline.graph.outputs):
            if isinstance(output, str) and output in outline.given and not outline.is_kept(o):
                home = max(outline.state_home(output), 0)
                found.setdefault(last, {}).setdefault(output, home)
        return found

    def waits(self, name: str, submesh: int) -> bool:
        """Whether a value must be passed on before a part of this submesh may read it."""
        return self._accumulated.get(name, submesh) != submesh

    def segment_of(self, name: str) -> int:
        """The segment that passes an accumulator on."""
        return self.outline.batching.accumulator_of[name].loop


# -- rounds ----------------------------------------------------------------------------------


def _rounds(
    outline: Outline, spread: _Spread, members: Sequence[int], segment: int
) -> dict[tuple[int, int], int]:
    """(op, submesh) -> the round that it runs in.

    There are as few rounds as can be; of these it is the last that suits all who read the op, so
    that what is not sent is computed where it is used.
    """
    soonest: dict[tuple[int, int], int] = {}
    reads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in members:
        for submesh in spread.on[i]:
            found, wait = list(_operands(outline, spread, soonest, i, submesh)), 0
            reads[i, submesh] = found
            if any(
                spread.waits(n, submesh) and spread.segment_of(n) == segment
                for n in outline.reads[i]
            ):
                wait = 1
            soonest[i, submesh] = max([wait, *(soonest[j, u] + (u != submesh) for j, u in found)])
    last = max(soonest.values(), default=0)
    latest = dict.fromkeys(soonest, last)
    for i in reversed(members):
        for submesh in spread.on[i]:
            for j, u in reads[i, submesh]:
                latest[j, u] = min(latest[j, u], latest[i, submesh] - (u != submesh))
    return latest


def _operands(
    outline: Outline,
    spread: _Spread,
    soonest: Mapping[tuple[int, int], int],
    i: int,
    submesh: int,
) -> Iterator[tuple[int, int]]:
    """The ops of the same segment that an op reads, each on the submesh that it reads it from."""
    for name in outline.reads[i]:
        j = outline.maker.get(name, -1)
        if j < 0 or not any((j, u) in soonest for u in spread.on.get(j, ())):
            continue
        if submesh in spread.on[j]:
            yield j, submesh
        else:
            yield j, min(spread.on[j], key=lambda u: (soonest[j, u], u))
