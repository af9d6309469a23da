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

from autopar.ir.program import Instruction, Program, Send


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

    def owns_all(self, submesh: int) -> bool:
        """True if all devices of a submesh are its own."""
        return self.submeshes[submesh] == frozenset({self.index})

    def others(self, submesh: int) -> tuple[int, ...]:
        """The processes that have no device of a submesh."""
        return tuple(p for p in range(self.count) if p not in self.submeshes[submesh])

    def is_crossing(self, source: int, target: int) -> bool:
        """True if what goes from one submesh to another may leave a process."""
        return len(self.submeshes[source] | self.submeshes[target]) > 1

    def runs(self, program: Program, step: Instruction, asks_all: bool = False) -> bool:
        """True if it takes part in an instruction.

        Where the transport `asks_all`, every process takes part in the sends that leave one.
        """
        if not isinstance(step, Send):
            return self.owns(program.submesh_of(step))
        if asks_all and self.is_crossing(step.source, step.target):
            return True
        return self.owns(step.source) or self.owns(step.target)

    def numbers(self, program: Program, asks_all: bool = False) -> Sequence[int]:
        """The numbers of the instructions that it takes part in, in order."""
        listed = program.instructions
        return [n for n, step in enumerate(listed) if self.runs(program, step, asks_all)]
