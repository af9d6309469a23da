"""Lower the parts of a step to one list of instructions for all submeshes, and verify it.

0 run  F0.0                      Tasks are in the order in which they would start if each took
1 send a.0 mesh0 -> mesh1        one slot; a value is sent right after the run that makes it,
2 run  F0.1                      and freed after its last use. As one list orders both ends of
3 send a.1 mesh0 -> mesh1        every send, whoever walks it in order cannot wait in a circle.
4 run  F1.0 ...                  Every register is written once, before it is read, and freed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, repeat

from autopar.errors import GraphError, bulleted
from autopar.ir.listing import Listing
from autopar.ir.program import ONCE, PartKind, PartProgram, Program, Run, Send, Start, Transfer
from autopar.ir.sharding import Sharding
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
from autopar.schedule.grid import Grid, Kind, Task

_SHOWN = 20
_LINEAR = ("sum", "same")  # what may combine partial sums before they are added up


def verify_program(program: Program) -> None:
    """Raise GraphError with a list of all faults, unless the program can run.

    Laws: each register is written once, read only between its write and its drop, and dropped once
    or returned; each part runs as often as it should; each send fits on both sides. As one list
    orders both ends of all sends, whoever walks it in that order cannot wait in a circle.
    """
    # All faults are gathered before anything is raised.
    faults = [*_part_faults(program), *_Walk(program).faults(), *_run_faults(program)]
    if faults:
        shown = faults[:_SHOWN]
        if len(faults) > len(shown):
            shown.append(f"... and {len(faults) - len(shown)} more")
        raise GraphError(
            bulleted(
                f"a program of {len(program.instructions)} instructions cannot run:",
                shown,
                "This is a fault of autopar's lowering: please report it.",
            )
        )


def _part_faults(program: Program) -> Iterator[str]:
    for number, program_of in enumerate(program.parts):
        part, given = program_of.part, program_of.listing
        if not 0 <= part.submesh < len(program.submeshes):
            yield f"part {number} ({part.name}) is on submesh {part.submesh}, which there is not"
        sizes = (len(given.input_shardings), len(given.output_shardings))
        if sizes != (len(part.graph.inputs), len(part.graph.outputs)):
            yield f"part {number} ({part.name}) lists {sizes[0]} inputs and {sizes[1]} outputs"


def _run_faults(program: Program) -> Iterator[str]:
    """Parts that run too often or too seldom."""
    found = Counter(
        (step.part, step.microbatch) for step in program.instructions if isinstance(step, Run)
    )
    for number, given in enumerate(program.parts):
        looped = PartKey.of(given.part).is_looped
        for i in range(program.microbatches) if looped else (ONCE,):
            count = found.pop((number, i), 0)
            if count != 1:
                which = "" if i == ONCE else f" of microbatch {i}"
                yield f"{given.part.name}{which} runs {count} times"
    for number, i in found:
        yield f"part {number} runs for microbatch {i}, which there is not"


class _Walk:
    """Interprets the instructions in order, and keeps track of every register."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._live: list[set[int]] = [set() for _ in program.register_counts]
        # How a register went, and where.
        self._freed: list[dict[int, tuple[str, str | int]]] = [{} for _ in program.register_counts]
        self._started: list[set[int]] = [set() for _ in program.register_counts]
        self._shardings: list[dict[int, Sharding]] = [{} for _ in program.register_counts]
        self._crossing: dict[tuple[tuple[int, ...], int, Sharding], bool] = {}
        # Of each part: a maximum of partial sums is not the maximum of the sums.
        self._mixed = [
            [
                accumulator
                for accumulator, sharding in zip(sums, made[len(made) - len(sums) :], strict=True)
                if sharding.partial and accumulator.combiner not in _LINEAR
            ]
            for sums, made in (
                (given.part.accumulators, given.listing.output_shardings) for given in program.parts
            )
        ]  # fmt: skip
        self._found: list[str] = []
        self._where: str | int = "the arguments"  # or the number of an instruction

    def faults(self) -> list[str]:
        """Walk to the end; gives back all faults, in order."""
        # Arguments are there from the start.
        for feed in self._program.feeds:
            self._write(feed.submesh, feed.registers, repeat(feed.sharding))
        for number, step in enumerate(self._program.instructions):
            self._where = number
            if isinstance(step, Run):
                self._run(step)
            elif isinstance(step, Send):
                self._send(step)
            elif isinstance(step, Start):
                self._write(step.submesh, step.registers, step.shardings)
                self._started[step.submesh].update(step.registers)
            else:
                for register in step.registers:
                    self._drop(step.submesh, register, "freed")
        # Outputs must be there at the end, and nothing else may be.
        self._where = "the end"
        for fetch in self._program.fetches:  # several outputs may be one value
            self._read(fetch.submesh, fetch.registers, (fetch.sharding,) * len(fetch.registers))
        for fetch in self._program.fetches:
            self._live[fetch.submesh].difference_update(fetch.registers)
        for submesh, live in enumerate(self._live):
            if live:
                names = ", ".join(f"r{r}" for r in sorted(live)[:5])
                self._fault(f"submesh {submesh} never frees {len(live)} registers: {names}")
        return self._found

    def _fault(self, text: str) -> None:
        self._found.append(f"{self._show(self._where)}: {text}")

    def _show(self, where: str | int) -> str:
        if isinstance(where, str):
            return where
        step = self._program.instructions[where]
        part = f" ({self._program.parts[step.part].part.name})" if isinstance(step, Run) else ""
        return f"instruction {where}{part}"

    def _run(self, step: Run) -> None:
        given = self._program.parts[step.part]
        part = given.part
        counts = (len(step.inputs), len(step.accumulators), len(step.outputs))
        summed = len(part.accumulators)
        wanted = (len(part.graph.inputs), summed, len(part.graph.outputs) - summed)
        if counts != wanted:
            self._fault(f"{counts} inputs, accumulators and outputs instead of {wanted}")
            return
        made = given.listing.output_shardings
        sums = len(made) - summed
        self._read(part.submesh, step.inputs, given.listing.input_shardings)
        self._read(part.submesh, step.accumulators, made[sums:])
        for accumulator in self._mixed[step.part]:
            self._fault(f"{accumulator.value} is combined by {accumulator.combiner} as a sum")
        # An accumulator must have been started.
        if not self._started[part.submesh].issuperset(step.accumulators):
            for register in sorted({*step.accumulators} - self._started[part.submesh]):
                self._fault(f"r{register} is no accumulator")
        # Donated state is overwritten by the outputs.
        for position in given.donated:
            register = step.inputs[position]
            if step.inputs.count(register) > 1:
                self._fault(f"r{register} is taken over, but read twice")
            self._drop(part.submesh, register, "taken over")
        self._write(part.submesh, step.outputs, made[:sums])

    def _send(self, step: Send) -> None:
        if step.source == step.target or not step.transfers:
            self._fault(f"sends {len(step.transfers)} values from submesh {step.source} to itself")
        # A partial sum has no meaning on other devices.
        for transfer in step.transfers:
            for submesh, sharding in (
                (step.source, transfer.before),
                (step.target, transfer.after),
            ):
                if not self._may_cross(transfer.value.shape, submesh, sharding):
                    mesh = self._program.submeshes[submesh].mesh
                    self._fault(f"{transfer.value} cannot cross as {sharding} on ({mesh})")
        transfers = step.transfers
        self._read(step.source, [p.source for p in transfers], tuple([p.before for p in transfers]))
        self._write(step.target, [p.target for p in transfers], [p.after for p in transfers])

    def _may_cross(self, shape: tuple[int, ...], submesh: int, sharding: Sharding) -> bool:
        """True if a value may leave or enter a submesh so; every microbatch asks the same."""
        key = shape, submesh, sharding
        if key not in self._crossing:
            mesh = self._program.submeshes[submesh].mesh
            self._crossing[key] = not sharding.partial and sharding.fits(shape, mesh)
        return self._crossing[key]

    # -- registers -------------------------------------------------------------------------

    def _read(
        self, submesh: int, registers: Sequence[int], shardings: tuple[Sharding, ...]
    ) -> None:
        live, lying = self._live[submesh], self._shardings[submesh]
        # Nearly always nothing is wrong, and a part has many registers.
        if live.issuperset(registers) and tuple([lying[r] for r in registers]) == shardings:
            return
        for register, sharding in zip(registers, shardings, strict=False):
            if register not in live:
                how = self._gone(submesh, register)
                self._fault(f"reads r{register} of submesh {submesh}, which is {how}")
                continue
            written = lying.get(register, sharding)
            if written is not sharding and written != sharding:
                self._fault(
                    f"reads r{register} of submesh {submesh} as {sharding}, not as {written}"
                )

    def _write(self, submesh: int, registers: Iterable[int], shardings: Iterable[Sharding]) -> None:
        live, freed = self._live[submesh], self._freed[submesh]
        lying, count = self._shardings[submesh], self._program.register_counts[submesh]
        for register, sharding in zip(registers, shardings, strict=False):
            lying[register] = sharding
            # Written once: neither there nor gone before.
            if register in live or register in freed:
                self._fault(f"writes r{register} of submesh {submesh} a second time")
            if not 0 <= register < count:
                self._fault(f"writes r{register} of submesh {submesh}, which has no such register")
            live.add(register)

    def _gone(self, submesh: int, register: int) -> str:
        """The fate of a register that is not there."""
        if register not in self._freed[submesh]:
            return "not there yet"
        how, where = self._freed[submesh][register]
        return f"{how} at {self._show(where)}"

    def _drop(self, submesh: int, register: int, how: str) -> None:
        if register not in self._live[submesh]:
            was = self._gone(submesh, register)
            self._fault(f"r{register} of submesh {submesh} is {how}, but is {was}")
        self._live[submesh].discard(register)
        self._freed[submesh][register] = how, self._where


_KINDS = {
    Kind.FORWARD: PartKind.FORWARD,
    Kind.BACKWARD: PartKind.BACKWARD,
    Kind.INPUT_GRADIENT: PartKind.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT: PartKind.WEIGHT_GRADIENT,
}

Route = tuple[int, int, Sequence[Passage]]  # from one submesh to another, and what is sent


def lower_pipeline(dataflow: PartDataflow, listings: Sequence[Listing]) -> Program:
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
            part_of: dict[tuple[Kind, int], int | None] = {}
            for task in _in_time(grid):
                of = task.kind, task.stage
                if of not in part_of:
                    part_of[of] = self._part_of(loop, task)
                k = part_of[of]
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
