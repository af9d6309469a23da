"""The projection of a program to one process of a job: which of its instructions that one runs.

Every process has the whole list and walks its part of it, in the list's order:

    list                     process 0 (mesh0)      process 1 (mesh1)
    0 run F0 on mesh0        run F0                 .
    1 send mesh0 -> mesh1    offer                  take
    2 run F1 on mesh1        .                      run F1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.ir.program import Instruction, Program

_Device = TypeVar("_Device")

# The number of what one process gives another:  | edge 20 | leg 16 | call 28 |
EDGE_BITS, LEG_BITS, CALL_BITS = 20, 16, 28

# The instructions that a process runs, each with its number in the list, in the order it has them.
Walk = tuple[tuple[int, Instruction], ...]


@dataclass(frozen=True)
class Host:
    """A process of a job, one of `count`, and the processes that have devices of each submesh."""

    index: int
    count: int
    submeshes: tuple[frozenset[int], ...]

    @property
    def is_alone(self) -> bool:
        """True if there is no other process."""
        return self.count == 1

    def owns(self, submesh: int) -> bool:
        """True if some devices of a submesh are its own."""
        return self.index in self.submeshes[submesh]

    def others(self, submesh: int) -> tuple[int, ...]:
        """The processes that have no device of a submesh."""
        return tuple(p for p in range(self.count) if p not in self.submeshes[submesh])

    def is_crossing(self, source: int, target: int) -> bool:
        """True if what goes from one submesh to another may leave a process."""
        return len(self.submeshes[source] | self.submeshes[target]) > 1

    def runs(self, source: int, target: int, asks_all: bool = False) -> bool:
        """True if it takes part in what is on these submeshes, or goes from one to the other.

        Where the transport `asks_all`, every process takes part in the sends that leave one.
        """
        if self.owns(source) or self.owns(target):
            return True
        return asks_all and source != target and self.is_crossing(source, target)

    def numbers(self, program: Program, asks_all: bool = False) -> Sequence[int]:
        """The numbers of the instructions that it takes part in, in order."""
        own = {ends for ends in set(program.ends) if self.runs(*ends, asks_all)}
        return [n for n, ends in enumerate(program.ends) if ends in own]

    def walk(self, program: Program, asks_all: bool = False) -> Walk:
        """Its instructions with their numbers."""
        return tuple((n, program.instructions[n]) for n in self.numbers(program, asks_all))


def walks(
    program: Program, count: int, submeshes: Sequence[frozenset[int]], asks_all: bool = False
) -> list[Walk]:
    """The walk of each process of a job; those with devices of the same submeshes share one."""
    made: dict[frozenset[int], Walk] = {}
    found: list[Walk] = []
    for process in range(count):
        host = Host(process, count, tuple(submeshes))
        own = frozenset(s for s in range(len(submeshes)) if host.owns(s))
        if own not in made:
            made[own] = host.walk(program, asks_all)
        found.append(made[own])
    return found


def paired(sources: Sequence[_Device], targets: Sequence[_Device]) -> list[tuple[_Device, _Device]]:
    """For each target device, in order, the source device whose piece it gets.

    With equal numbers of devices that is device i; else each piece lies several times on the side
    that has more of them.
    """
    count = len(targets)
    return [(sources[i * len(sources) // count], target) for i, target in enumerate(targets)]


def transfer_id(edge: int, leg: int, call: int) -> int:
    """The number under which one process offers what another pulls, the same in both.

    The edge is the send's place in the list, so that it needs no counter that could be amiss.
    """
    return ((edge << LEG_BITS) | leg) << CALL_BITS | (call & ((1 << CALL_BITS) - 1))
