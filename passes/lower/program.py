"""Lower the parts of a step to one list of instructions for all submeshes.

0 run  F0.0                      Tasks are in the order in which they would start if each took
1 send a.0 mesh0 -> mesh1        one slot; a value is sent right after the run that makes it,
2 run  F0.1                      and freed after its last use. As one list orders both ends of
3 send a.1 mesh0 -> mesh1        every send, whoever walks it in order cannot wait in a circle.
4 run  F1.0 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from autopar.ir.program import (
    ONCE,
    PartKind,
    PartProgram,
    Program,
    Run,
    Send,
    Start,
    Transfer,
)
from autopar.ir.spmd import SpmdProgram
from autopar.passes.lower.partition.part_assignment import PartKey
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.register_allocation import (
    Group,
    Passage,
    RegisterAllocation,
    Slot,
    insert_frees,
)
from autopar.passes.lower.partition.step_analysis import grid_of
from autopar.passes.lower.verify import verify_program
from autopar.schedule.grid import Grid, Kind, Task

_KINDS = {
    Kind.FORWARD: PartKind.FORWARD,
    Kind.BACKWARD: PartKind.BACKWARD,
    Kind.INPUT_GRADIENT: PartKind.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT: PartKind.WEIGHT_GRADIENT,
}

Route = tuple[int, int, Sequence[Passage]]  # from one submesh to another, and what is sent


def lower_pipeline(dataflow: PartDataflow, listings: Sequence[SpmdProgram]) -> Program:
    """Lower a step that `split` has cut, given the listing of each part.

    Raises GraphError if the program could not run, or would compute something else.
    """
    step, parts = dataflow.step, dataflow.parts
    # 1. Registers for all values; runs and sends in order; frees.
    allocation = RegisterAllocation(dataflow, listings)
    groups = list(_Order(dataflow, allocation).groups())
    instructions, donated = insert_frees(groups, parts, allocation)
    program = Program(
        step.stages.submeshes,
        tuple(
            PartProgram(part, listing, positions)
            for part, listing, positions in zip(parts, listings, donated, strict=True)
        ),
        instructions,
        allocation.feeds,
        allocation.fetches,
        tuple(allocation.register_counts),
        step.batching.microbatches,
    )
    # 2. The laws of a program.
    verify_program(program)
    return program


@dataclass(frozen=True)
class _Order:
    """The order in which the parts of a step run; each sends at once what others wait for."""

    dataflow: PartDataflow
    allocation: RegisterAllocation

    def groups(self) -> Iterator[Group]:
        """Runs, each with the sends after it, in the order of the whole step."""
        batching = self.dataflow.step.batching
        # State that other submeshes read is sent first; then the hoist and setup run.
        yield from ([_send(route, ONCE)] for route in self._routes_of(self.allocation.fed))
        yield from self._once(range(-2, 0))
        for loop in range(batching.loops):
            # Each loop: accumulators start at their neutral value, the grid's tasks run, then the
            # update.
            yield from ([start] for start in self._starts(loop))
            grid = grid_of(self.dataflow.step.stages, batching.microbatches)
            for task in _in_time(grid):
                k = self._part_of(loop, task)
                if k is not None:
                    yield from self._run(k, task.microbatch)
            yield from self._once([2 * loop + 1])

    def _once(self, times: Sequence[int]) -> Iterator[Group]:
        for k, part in enumerate(self.dataflow.parts):
            key = PartKey.of(part)
            if not key.is_looped and key.order[0] in times:
                yield from self._run(k, ONCE)

    def _part_of(self, loop: int, task: Task) -> int | None:
        """The part that a task runs; one with no ops has none.

        If no lower stage waits, all of the backward pass is W, and runs in I's place.
        """
        submesh = self.dataflow.step.submesh(task.stage)

        def part_of(kind: PartKind) -> int | None:
            return self.dataflow.number.get(PartKey(kind, task.stage, submesh, loop))

        # A stage that no other waits for has no I: its W runs as soon as I could, to free
        # activations.
        inputs = part_of(PartKind.INPUT_GRADIENT)
        if task.kind is Kind.INPUT_GRADIENT and inputs is None:
            return part_of(PartKind.WEIGHT_GRADIENT)
        if task.kind is Kind.WEIGHT_GRADIENT and inputs is None:
            return None
        return part_of(_KINDS[task.kind])

    def _run(self, k: int, microbatch: int) -> Iterator[Group]:
        allocation, i = self.allocation.parts[k], max(microbatch, 0)
        run = Run(
            k,
            microbatch,
            allocation.rows.inputs.at(i),
            allocation.rows.accumulators.at(i),
            allocation.rows.outputs.at(i),
        )
        yield [run, *(_send(route, microbatch) for route in self._routes[k])]

    @cached_property
    def _routes(self) -> Sequence[Sequence[Route]]:
        """The values that are sent after each part has run."""
        return [list(self._routes_of(slots.outputs)) for slots in self.allocation.parts]

    def _routes_of(self, slots: Sequence[Slot]) -> Iterator[Route]:
        for submesh, mine in groupby(slots, key=lambda slot: slot.submesh):
            for target, passages in self.allocation.sends(list(mine)).items():
                yield submesh, target, passages

    def _starts(self, loop: int) -> Iterator[Start]:
        found: dict[int, list[tuple[int, int]]] = {}
        for k, part in enumerate(self.dataflow.parts):
            # One instruction starts all accumulators of a submesh.
            if part.loop == loop:
                for a in range(len(part.accumulators)):
                    found.setdefault(part.submesh, []).append((k, a))
        for submesh, places in sorted(found.items()):
            slots = [self.allocation.parts[k].accumulators[a] for k, a in places]
            yield Start(
                submesh,
                tuple(self.dataflow.parts[k].accumulators[a] for k, a in places),
                tuple(slot.value for slot in slots),
                tuple(slot.sharding for slot in slots),
                tuple(slot.first for slot in slots),
            )


def _send(route: Route, microbatch: int) -> Send:
    source, target, passages = route
    i = max(microbatch, 0)
    transfers = tuple(
        Transfer(a.value, a.register(i), b.register(i), a.sharding, b.sharding) for a, b in passages
    )
    return Send(source, target, transfers, microbatch)


def _in_time(grid: Grid) -> list[Task]:
    """The tasks of a grid in the order in which they start if each takes one slot.

    So whoever drives several submeshes keeps all of them busy, and each task comes after those
    that it waits for.
    """
    found = [
        (slot, device, task)
        for device, (row, slots) in enumerate(zip(grid.rows, grid.slots, strict=True))
        for task, slot in zip(row, slots, strict=True)
    ]
    return [task for _, _, task in sorted(found, key=lambda entry: entry[:2])]
