"""A step as a program of submeshes: its parts, and the instructions that run them in order.

A part is a piece of the step that one submesh runs as one compiled program. The list is global
and plain: whoever drives some of the submeshes walks it and skips what is not theirs. Values lie
in registers, numbered for each submesh; a register is written once in a step, but for those of
accumulators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from autopar.ir.batching import Accumulator, Rows
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing
from autopar.ir.sharding import Sharding
from autopar.ir.stages import Submesh
from autopar.ir.values import Value

ONCE = -1  # the microbatch of what runs once a step


class PartKind(Enum):
    """The role of a part in its step: all of it, or a task of one stage."""

    WHOLE = "step"  # all of the step: the only part of its program
    HOIST = "hoist"  # on the whole batch, before everything
    SETUP = "setup"  # what no microbatch changes, before the first
    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"  # dgrad
    WEIGHT_GRADIENT = "W"  # wgrad
    UPDATE = "update"  # what needs the sums: between loops, and after the last

    @property
    def runs_once(self) -> bool:
        """True if it runs once a step, and not for each microbatch."""
        return self in (PartKind.WHOLE, PartKind.HOIST, PartKind.SETUP, PartKind.UPDATE)


@dataclass(frozen=True)
class Part:
    """Ops that one stage runs together: a graph of its own, whose values keep their names.

    Op i is equation `equations[i]` of the microbatch's program (of the whole batch's, for a
    hoist). Outputs that are `accumulators` are combined into what the submesh has of them, and
    the part gives back the combination. An update part has a `round`: each waits for scalars of
    the one before; so may a setup part.
    """

    kind: PartKind
    stage: int
    submesh: int
    graph: Graph
    equations: tuple[int, ...]
    loop: int = 0
    round: int = 0
    accumulators: tuple[Accumulator, ...] = ()

    @property
    def is_looped(self) -> bool:
        """True if it runs once for each microbatch."""
        return not self.kind.runs_once

    @property
    def name(self) -> str:
        """Its name in lists, grids and traces: F2, B0, update1.0; that of the step if it is all."""
        if self.kind is PartKind.WHOLE:
            return self.graph.name
        tail = f".{self.round}" if self.kind is PartKind.UPDATE or self.round else ""
        return f"{self.kind.value}{self.stage}{tail}" + (f"'{self.loop}" if self.loop else "")


@dataclass(frozen=True)
class SubmeshGraph:
    """The work of a submesh in a step as one graph, so that its sharding is one decision.

    Op j is equation `equations[j]` of the microbatch's program, once even if several parts repeat
    it, and its `runs` are those of all parts together. Inputs are arguments and what other
    submeshes send; outputs are what is returned or sent. `stashed` are values of a microbatch that
    wait from one part to another, one for each microbatch in flight. Values that are `final` never
    lie as partial sums between parts; all others may.
    """

    submesh: int
    graph: Graph
    equations: tuple[int, ...]
    stashed: tuple[str, ...]
    final: frozenset[str]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Equation of the microbatch's program -> the op that it is."""
        return {e: j for j, e in enumerate(self.equations)}


@dataclass(frozen=True)
class PartProgram:
    """A part as its submesh runs it; `donated` are positions of inputs whose buffers it may reuse.

    The listing's inputs and outputs are the graph's. A sharding with partial axes lies as a stack:
    one leading dim, sharded over those axes, of what is yet to be combined. Accumulators come in
    after the inputs, in order, each lying as the output that it is added to, and are always
    donated.
    """

    part: Part
    listing: Listing
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """Run a part: registers in and out, of its submesh. Accumulators are overwritten in place.

    `outputs` has a register for each output that is no accumulator.
    """

    part: int
    microbatch: int
    inputs: tuple[int, ...]
    accumulators: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The transfer of one value: register `source` of one submesh becomes `target` of another."""

    value: Value
    source: int
    target: int
    before: Sharding
    after: Sharding


@dataclass(frozen=True)
class Send:
    """Values of one part that another submesh reads, together."""

    source: int
    target: int
    transfers: tuple[Transfer, ...]
    microbatch: int


@dataclass(frozen=True)
class Start:
    """Give each accumulator of a submesh its neutral value: zero for sums."""

    submesh: int
    accumulators: tuple[Accumulator, ...]
    values: tuple[Value, ...]
    shardings: tuple[Sharding, ...]
    registers: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """Drop registers after their last use."""

    submesh: int
    registers: tuple[int, ...]


Instruction = Run | Send | Start | Free


@dataclass(frozen=True)
class Feed:
    """An argument of the step on a submesh that reads it: one register, or one a microbatch.

    `input` counts the graph's inputs. With `rows` the registers hold the microbatches' slices in
    order; of the index input they hold the microbatches' numbers; else there is one register.
    """

    input: int
    submesh: int
    sharding: Sharding
    registers: tuple[int, ...]
    rows: Rows | None = None
    is_index: bool = False


@dataclass(frozen=True)
class Fetch:
    """An output of the step: where it lies at the end. With `rows`, one register a microbatch."""

    output: int
    submesh: int
    sharding: Sharding
    registers: tuple[int, ...]
    rows: Rows | None = None


@dataclass(frozen=True)
class Program:
    """The whole step on its submeshes: parts, instructions in a global order, what goes in and out.

    `register_counts` has one number for each submesh.
    """

    submeshes: tuple[Submesh, ...]
    parts: tuple[PartProgram, ...]
    instructions: tuple[Instruction, ...]
    feeds: tuple[Feed, ...]
    fetches: tuple[Fetch, ...]
    register_counts: tuple[int, ...]
    microbatches: int

    @classmethod
    def of_one_part(cls, graph: Graph, listing: Listing, submesh: Submesh) -> Program:
        """The program of a step that is one part on one submesh: read, run, give back.

        Inputs lie in the first registers, in order, and outputs in those that follow.
        """
        inputs = tuple(range(len(graph.inputs)))
        outputs = tuple(range(len(inputs), len(inputs) + len(graph.outputs)))
        part = Part(PartKind.WHOLE, 0, 0, graph, tuple(range(len(graph.ops))))
        state = tuple(sorted(i for _, i in graph.donated))
        feeds = zip(inputs, listing.input_shardings, strict=True)
        fetches = zip(outputs, listing.output_shardings, strict=True)
        return cls(
            (submesh,),
            (PartProgram(part, listing, state),),
            (Run(0, ONCE, inputs, (), outputs),),
            tuple(Feed(i, 0, s, (i,)) for i, s in feeds),
            tuple(Fetch(n, 0, s, (r,)) for n, (r, s) in enumerate(fetches)),
            (len(inputs) + len(outputs),),
            1,
        )

    @property
    def is_one_part(self) -> bool:
        """True if one program runs the whole step: no stages and no microbatches."""
        return self.parts[0].part.kind is PartKind.WHOLE

    def only(self, numbers: Sequence[int]) -> Program:
        """The program with these of its instructions alone, as one process of several runs it."""
        return replace(self, instructions=tuple(self.instructions[n] for n in numbers))

    def submesh_of(self, instruction: Instruction) -> int:
        """The submesh that runs an instruction; the sending one of a send."""
        if isinstance(instruction, Run):
            return self.parts[instruction.part].part.submesh
        return instruction.source if isinstance(instruction, Send) else instruction.submesh

    @cached_property
    def ends(self) -> tuple[tuple[int, int], ...]:
        """The submeshes that each instruction is on: those of a send are its source and target."""
        return tuple(
            (self.submesh_of(s), s.target if isinstance(s, Send) else self.submesh_of(s))
            for s in self.instructions
        )

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each instruction those whose results it reads, in order; feeds are none."""
        writer: dict[tuple[int, int], int] = {}
        found: list[tuple[int, ...]] = []
        for number, step in enumerate(self.instructions):
            read = {writer[place] for place in self._reads(step) if place in writer}
            found.append(tuple(sorted(read)))
            writer.update((place, number) for place in self._writes(step))
        return tuple(found)

    def _reads(self, step: Instruction) -> list[tuple[int, int]]:
        """(submesh, register) of what an instruction reads."""
        if isinstance(step, Run):
            submesh = self.submesh_of(step)
            return [(submesh, r) for r in (*step.inputs, *step.accumulators)]
        return [(step.source, t.source) for t in step.transfers] if isinstance(step, Send) else []

    def _writes(self, step: Instruction) -> list[tuple[int, int]]:
        """(submesh, register) of what an instruction writes."""
        if isinstance(step, Run):
            submesh = self.submesh_of(step)
            return [(submesh, r) for r in (*step.outputs, *step.accumulators)]
        if isinstance(step, Send):
            return [(step.target, t.target) for t in step.transfers]
        return [(step.submesh, r) for r in step.registers] if isinstance(step, Start) else []

    def __str__(self) -> str:
        return "\n".join(
            f"{number:5} mesh{self.submesh_of(step)} {self.text_of(step)}"
            for number, step in enumerate(self.instructions)
        )

    def text_of(self, step: Instruction) -> str:
        """An instruction as the list has it."""
        if isinstance(step, Run):
            name = self.parts[step.part].part.name
            which = "" if step.microbatch == ONCE else f".{step.microbatch}"
            return (
                f"run {name}{which} ({_registers(step.inputs)}) -> {_registers(step.outputs)}"
                + (f" += {_registers(step.accumulators)}" if step.accumulators else "")
            )
        if isinstance(step, Send):
            sent = ", ".join(
                f"{p.value.type_text} r{p.source}->r{p.target}" for p in step.transfers
            )
            return f"send -> mesh{step.target}: {sent}"
        verb = "start" if isinstance(step, Start) else "free"
        return f"{verb} {_registers(step.registers)}"


def _registers(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"r{n}" for n in numbers)
