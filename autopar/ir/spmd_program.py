"""A program of submeshes as one program that all of them run together, in ticks.

    tick         0    1    2     3     4    5       In a tick every submesh runs one forward part,
    submesh 0    F0   F1   F2B0  F3B1  B2   B3      one backward part, both or none. Then all of
    submesh 1         FB0  FB1   FB2   FB3          them pass on what their neighbours wait for.

All devices run the same code, so all of them have room for the same cells. A cell holds a value
of each submesh, all of one local shape and dtype; values of microbatches in flight share a ring:

    cell 0   w of submesh 0 | w of submesh 1        one value on each
    cell 1   x of microbatches 4, 5, 3 | 2, 3, -    a ring of three

Where submeshes run equal stages every cell is in use on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.listing import Move
from autopar.ir.program import Program
from autopar.ir.values import item_bytes

NONE = -1  # no part, no microbatch, no cell, no register


@dataclass(frozen=True)
class Cell:
    """Room on every device for a piece of this shape.

    A ring has `depth` of them, one a microbatch in flight; with depth 0 there is one for the step.
    Sums over microbatches have a `combiner`.
    """

    shape: tuple[int, ...]
    dtype: str
    depth: int = 0
    combiner: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes on each device."""
        return math.prod(self.shape) * item_bytes(self.dtype) * max(1, self.depth)


@dataclass(frozen=True)
class Source:
    """The place that a part reads an input from: a cell, or what another part has just made.

    With neither it is the number of the microbatch.
    """

    cell: int = NONE
    part: int = NONE
    output: int = NONE


@dataclass(frozen=True)
class SpmdPart:
    """A part of the program: the sources of its inputs, the cells of its sums and outputs."""

    inputs: tuple[Source, ...]
    sums: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Shift:
    """A cell of some submeshes becomes another cell of others: `pairs` are (from, to).

    All of them first `move` it to the sharding that it has there.
    """

    source: int
    target: int
    pairs: tuple[tuple[int, int], ...]
    move: Move | None = None


@dataclass(frozen=True)
class Wave:
    """Shifts, then at most one part on every submesh, once."""

    shifts: tuple[Shift, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """Passes what a part of each sender has just made to a cell of another submesh.

    `senders` are (from, to, part, its output); it is moved first, as in a `Shift`.
    """

    target: int
    senders: tuple[tuple[int, int, int, int], ...]
    move: Move | None = None


@dataclass(frozen=True)
class Turn:
    """The forward or the backward half of all ticks.

    `parts` has for each submesh the parts that it runs in a row, `ticks` for each tick and submesh
    the microbatch that it runs them on.
    """

    parts: tuple[tuple[int, ...], ...]
    ticks: tuple[tuple[int, ...], ...]
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Loop:
    """A loop over all microbatches: sums start at their neutral value, then tick follows tick."""

    sums: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def tick_count(self) -> int:
        """The number of ticks."""
        return len(self.turns[0].ticks)


@dataclass(frozen=True)
class Held:
    """A cell that the step is given or gives back: its register on each submesh, or none.

    Of a ring it is the first register of as many as there are microbatches.
    """

    cell: int
    registers: tuple[int, ...]
    is_consumed: bool = False


@dataclass(frozen=True)
class SpmdProgram:
    """A whole step in one program: waves and loops in order, over the parts of `program`."""

    program: Program
    cells: tuple[Cell, ...]
    parts: tuple[SpmdPart, ...]
    segments: tuple[Wave | Loop, ...]
    feeds: tuple[Held, ...]
    fetches: tuple[Held, ...]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops over microbatches."""
        return tuple(s for s in self.segments if isinstance(s, Loop))

    @property
    def tick_count(self) -> int:
        """The number of ticks of all loops."""
        return sum(loop.tick_count for loop in self.loops)

    @cached_property
    def unused_bytes(self) -> int:
        """Bytes of state on each device, on average, that only other submeshes have a use for."""
        count = len(self.program.submeshes)
        idle = (self.cells[h.cell].nbytes * h.registers.count(NONE) for h in self.feeds)
        return sum(idle) // count

    @property
    def state_bytes(self) -> int:
        """Bytes of arguments on each device."""
        return sum(self.cells[h.cell].nbytes for h in self.feeds)

    @property
    def sum_bytes(self) -> int:
        """Bytes of sums over microbatches on each device."""
        return sum(cell.nbytes for cell in self.cells if cell.combiner)

    @property
    def ring_bytes(self) -> int:
        """Bytes of values of microbatches on each device, with a place for what is of none."""
        fed = {h.cell for h in self.feeds}
        rings = (c for n, c in enumerate(self.cells) if c.depth and n not in fed)
        return sum(cell.nbytes * (cell.depth + 1) // cell.depth for cell in rings)

    @property
    def lane_bytes(self) -> int:
        """Bytes on each device of what lanes send in a tick, and of the one that is arriving."""
        most = 0
        for loop in self.loops:
            sent = [
                cell.nbytes // max(1, cell.depth)
                for turn in loop.turns
                for cell in (self.cells[lane.target] for lane in turn.lanes)
            ]
            most = max(most, sum(sent) + max(sent, default=0))
        return most

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches between their forward and backward, by submesh."""
        most = [0] * len(self.program.submeshes)
        for loop in self.loops:
            held = [0] * len(most)
            for tick in range(loop.tick_count):
                for s in range(len(most)):
                    forward, backward = (t.ticks[tick][s] != NONE for t in loop.turns)
                    both = len(loop.turns[1].parts[s]) > 1  # its forward is in this turn
                    held[s] += forward or (both and backward)
                    most[s] = max(most[s], held[s])
                    held[s] -= backward
        return tuple(most)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for number, cell in enumerate(self.cells):
            ring = f" x{cell.depth} microbatches" if cell.depth else ""
            sums = f" {cell.combiner}" if cell.combiner else ""
            shape = ",".join(map(str, cell.shape))
            yield f"cell {number:3} {cell.dtype}[{shape}]{ring}{sums}"
        for segment in self.segments:
            if isinstance(segment, Wave):
                for shift in segment.shifts:
                    pairs = ", ".join(f"{a}->{b}" for a, b in shift.pairs)
                    yield f"shift cell {shift.source} -> cell {shift.target}: {pairs}"
                yield f"run {' | '.join(self._name(p) for p in segment.parts)}"
            else:
                yield from self._loop_lines(segment)

    def _loop_lines(self, loop: Loop) -> Iterator[str]:
        for tick in range(loop.tick_count):
            ran = [
                "".join(f"{self._name(p)}.{turn.ticks[tick][s]} " for p in parts)
                for turn in loop.turns
                for s, parts in enumerate(turn.parts)
                if turn.ticks[tick][s] != NONE
            ]
            yield f"tick {tick:3} {' '.join(text.strip() for text in ran)}"

    def _name(self, part: int) -> str:
        return "-" if part == NONE else self.program.parts[part].part.name
