"""Joins moves between submeshes to the parts at their ends, so that they need no program of theirs.

Where a value is to lie otherwise on the submesh that it is sent to, one of the two sides lays it
out anew: the one that has less to move (`transport/bridge.py`). Where it is made for that send
alone, or read by one part alone, that part can do it, and what is sent lies alike on both sides:

    mesh1: B1 -> [rows]   send   [rows] -> laid out anew -> [whole]   mesh0: B0
    mesh1: B1 -> [rows]   send   [rows]   mesh0: B0, which begins with laying it out anew

A program of its own for each microbatch takes the host longer than the move takes the devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.program import Free, Instruction, Program, Run, Send
from autopar.ir.sharding import MeshShape, Sharding
from autopar.runtime.parts import PartSource

End = tuple[int, int]  # a part, and the number of one of its inputs or plain outputs
_Transfer = tuple[int, int]  # an instruction, and the number of one of its transfers


@dataclass
class _Held:
    """A value in a register: the output or the transfer that put it there, and its uses."""

    maker: End | None = None
    arrived: _Transfer | None = None
    readers: list[End] = field(default_factory=list[End])
    sends: list[_Transfer] = field(default_factory=list[_Transfer])
    has_other: bool = False


def join_moves(
    program: Program, sources: Sequence[PartSource], meshes: Sequence[MeshShape]
) -> tuple[Program, tuple[PartSource, ...]]:
    """The program and the parts, with every move that a part at one of its ends can do."""
    held = _held_values(program)
    makers, readers = dict[End, list[_Held]](), dict[End, list[_Held]]()
    for value in held:
        if value.maker is not None:
            makers.setdefault(value.maker, []).append(value)
        for end in value.readers:
            readers.setdefault(end, []).append(value)
    moves = _Moves(program, meshes)
    leaving = {end: s for end, own in makers.items() if (s := moves.leaving(own)) is not None}
    arriving = {end: s for end, own in readers.items() if (s := moves.arriving(own)) is not None}
    before = {n: s for end, s in leaving.items() for v in makers[end] for n in v.sends}
    after = {n: s for end, s in arriving.items() for v in readers[end] if (n := v.arrived)}
    steps = [_joined(n, step, before, after) for n, step in enumerate(program.instructions)]
    parts = tuple(
        replace(source, arriving=_of_part(arriving, n), leaving=_of_part(leaving, n))
        for n, source in enumerate(sources)
    )
    return replace(program, instructions=tuple(steps)), parts


def _of_part(found: dict[End, Sharding], part: int) -> dict[int, Sharding]:
    return {place: sharding for (n, place), sharding in found.items() if n == part}


def _joined(
    number: int,
    step: Instruction,
    before: dict[_Transfer, Sharding],
    after: dict[_Transfer, Sharding],
) -> Instruction:
    """A send of values that lie as the parts at its ends have them by now."""
    if not isinstance(step, Send):
        return step
    transfers = [
        replace(t, before=before.get((number, i), t.before), after=after.get((number, i), t.after))
        for i, t in enumerate(step.transfers)
    ]
    return replace(step, transfers=tuple(transfers))


def _held_values(program: Program) -> list[_Held]:
    """Each value that a register holds at some time; who reads none is found by its type."""
    now = defaultdict[tuple[int, int], _Held](lambda: _Held(has_other=True))
    found: list[_Held] = []

    def put(submesh: int, registers: Iterable[int], values: Iterable[_Held]) -> None:
        for register, value in zip(registers, values, strict=True):
            now[submesh, register] = value
            found.append(value)

    for feed in program.feeds:
        put(feed.submesh, feed.registers, [_Held(has_other=True) for _ in feed.registers])
    for number, step in enumerate(program.instructions):
        if isinstance(step, Run):
            submesh = program.submesh_of(step)
            for i, register in enumerate(step.inputs):
                now[submesh, register].readers.append((step.part, i))
            made = [_Held(maker=(step.part, i)) for i in range(len(step.outputs))]
            put(submesh, step.outputs, made)
        elif isinstance(step, Send):
            for i, t in enumerate(step.transfers):
                now[step.source, t.source].sends.append((number, i))
            came = [_Held(arrived=(number, i)) for i in range(len(step.transfers))]
            put(step.target, [t.target for t in step.transfers], came)
        elif isinstance(step, Free):
            for register in step.registers:
                now.pop((step.submesh, register), None)
        else:
            put(step.submesh, step.registers, [_Held(has_other=True) for _ in step.registers])
    for fetch in program.fetches:
        for register in fetch.registers:
            now[fetch.submesh, register].has_other = True
    return found


@dataclass(frozen=True)
class _Moves:
    """The moves that sends make, and the side that makes each."""

    program: Program
    meshes: Sequence[MeshShape]

    def leaving(self, own: Sequence[_Held]) -> Sharding | None:
        """The sharding in which a part can leave an output, each time: the receiver's."""
        wanted: set[Sharding] = set()
        for value in own:
            if value.readers or value.has_other or not value.sends:
                return None
            wanted.update(after for n in value.sends if (after := self._ends(n)[1]) is not None)
            if not all(self._is_cut_before(n) for n in value.sends):
                return None
        return wanted.pop() if len(wanted) == 1 else None

    def arriving(self, own: Sequence[_Held]) -> Sharding | None:
        """The sharding in which a part can take an input, each time: the sender's."""
        wanted: set[Sharding] = set()
        for value in own:
            if value.arrived is None or value.sends or value.has_other or len(value.readers) > 1:
                return None
            before, after = self._ends(value.arrived)
            if before is None or before == after or self._is_cut_before(value.arrived):
                return None
            wanted.add(before)
        return wanted.pop() if len(wanted) == 1 else None

    def _ends(self, number: _Transfer) -> tuple[Sharding | None, Sharding | None]:
        """The shardings at both ends of a transfer; None where one has no form at the other."""
        step = self.program.instructions[number[0]]
        assert isinstance(step, Send)
        transfer = step.transfers[number[1]]
        is_plain = not (transfer.before.partial or transfer.after.partial)
        if self.meshes[step.source] != self.meshes[step.target] or not is_plain:
            return None, None
        return transfer.before, transfer.after

    def _is_cut_before(self, number: _Transfer) -> bool:
        """True if the sender lays it out anew, as the receiver's pieces are no larger."""
        step = self.program.instructions[number[0]]
        before, after = self._ends(number)
        if before is None or after is None or before == after:
            return False
        assert isinstance(step, Send)
        mesh = self.meshes[step.source]
        return after.pieces(mesh) >= before.pieces(mesh)
