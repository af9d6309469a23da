"""Programs of stages in any order that their tasks allow, by a seed: lists alone, with no ops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.ir.batching import Accumulator
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, Listing
from autopar.ir.program import (
    ONCE,
    Feed,
    Fetch,
    Instruction,
    Part,
    PartKind,
    PartProgram,
    Program,
    Run,
    Send,
    Start,
    Transfer,
)
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.stages import Submesh
from autopar.ir.values import Value
from tests.runtime.stages import freed

_F, _B, _U = PartKind.FORWARD, PartKind.BACKWARD, PartKind.UPDATE
_VALUE, _WHOLE = Value("%1", (4, 4), "f32"), Sharding(((), ()))
Task = tuple[PartKind, int, int]  # kind, stage, microbatch


@dataclass
class Listed:
    """A program as it grows: instructions, and a register for each name on each submesh."""

    submesh_of: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    registers: list[dict[str, int]] = field(default_factory=list[dict[str, int]])

    @property
    def stages(self) -> int:
        return len(self.submesh_of)

    def at(self, submesh: int, name: str) -> int:
        own = self.registers[submesh]
        return own.setdefault(name, len(own))

    def run(self, task: Task) -> Run:
        """Weights and an activation come into F, what B reads goes out; B adds to a sum.

        The last stage also reads the first one's weights.
        """
        kind, s, i = task
        m, last = self.submesh_of[s], self.stages - 1
        part = (_F, _B, _U).index(kind) * self.stages + s
        sums: list[str] = []
        if kind is _U:
            given, made = [f"w{s}", f"sum{s}"], [f"new{s}"]
        elif kind is _F:
            given = [f"w{s}", f"a{s - 1}.{i}" if s else f"x.{i}", *["w0"][: s == last]]
            made = [f"a{s}.{i}", f"kept{s}.{i}"]
        else:
            given = [f"w{s}", f"kept{s}.{i}", *([f"g{s + 1}.{i}"] if s < last else [])]
            made, sums = [f"g{s}.{i}"] if s else [], [f"sum{s}"]

        def at(names: list[str]) -> tuple[int, ...]:
            return tuple(self.at(m, n) for n in names)

        return Run(part, i, at(given), at(sums), at(made))

    def sends(self, task: Task) -> Iterator[Send]:
        """What the next stage reads, where it is elsewhere."""
        kind, s, i = task
        last = self.stages - 1
        if kind is _U and s == 0:
            yield from self.send("new0", 0, last, i)
        elif kind is _F and s < last:
            yield from self.send(f"a{s}.{i}", s, s + 1, i)
        elif kind is _B and s:
            yield from self.send(f"g{s}.{i}", s, s - 1, i)

    def send(self, name: str, stage: int, to: int, i: int) -> Iterator[Send]:
        ends = self.submesh_of[stage], self.submesh_of[to]
        if ends[0] != ends[1]:
            registers = self.at(ends[0], name), self.at(ends[1], name)
            yield Send(*ends, (Transfer(_VALUE, *registers, _WHOLE, _WHOLE),), i)


def any_program(seed: int, submeshes: int = 0, chunks: int = 0, microbatches: int = 0) -> Program:
    """A program whose tasks come in an order drawn from all that are possible."""
    rng = random.Random(seed)
    count = submeshes or rng.randint(2, 4)
    chunks = chunks or rng.randint(1, 2)
    microbatches = microbatches or rng.randint(1, 4)
    made = Listed(tuple(range(count)) * chunks, registers=[{} for _ in range(count)])
    stages = range(made.stages)
    # 1. Arguments have the first registers: weights, batches.
    feeds = [
        Feed(s, made.submesh_of[s], _WHOLE, (made.at(made.submesh_of[s], f"w{s}"),)) for s in stages
    ]
    batches = tuple(made.at(0, f"x.{i}") for i in range(microbatches))
    feeds.append(Feed(made.stages, 0, _WHOLE, batches))
    # 2. The first weights go to the last stage and sums start; then any task whose operands are
    #    there, with its sends.
    made.instructions += made.send("w0", 0, made.stages - 1, ONCE)
    for s in stages:
        sums = (Accumulator("%1", 0, "sum", ""),)
        register = made.at(made.submesh_of[s], f"sum{s}")
        made.instructions.append(Start(made.submesh_of[s], sums, (_VALUE,), (_WHOLE,), (register,)))
    done: set[Task] = set()
    tasks: list[Task] = [(k, s, i) for k in (_F, _B) for s in stages for i in range(microbatches)]
    tasks += [(_U, s, ONCE) for s in stages]
    while tasks:
        ready = [
            t for t in tasks if all(o in done for o in _operands(t, made.stages, microbatches))
        ]
        task = rng.choice(ready)
        tasks.remove(task)
        done.add(task)
        made.instructions += [made.run(task), *made.sends(task)]
    # 3. New weights are given back, the first ones also from where they are sent to. All else is
    #    dropped after its last use.
    fetches = [
        Fetch(s, made.submesh_of[s], _WHOLE, (made.at(made.submesh_of[s], f"new{s}"),))
        for s in stages
    ]
    there = made.submesh_of[-1]
    fetches.append(Fetch(made.stages + 1, there, _WHOLE, (made.at(there, "new0"),)))
    parts = tuple(_part(kind, s, made.submesh_of[s]) for kind in (_F, _B, _U) for s in stages)
    kept = {(f.submesh, r) for f in fetches for r in f.registers}
    return Program(
        tuple(Submesh(MeshShape.of((2,))) for _ in range(count)),
        parts,
        tuple(freed(made.instructions, parts, kept)),
        tuple(feeds),
        tuple(fetches),
        tuple(len(own) for own in made.registers),
        microbatches,
    )  # fmt: skip


def _operands(task: Task, stages: int, microbatches: int) -> list[Task]:
    kind, s, i = task
    if kind is _F:
        return [(_F, s - 1, i)] if s else []
    if kind is _B:
        return [(_F, s, i), *([(_B, s + 1, i)] if s + 1 < stages else [])]
    return [(_B, s, n) for n in range(microbatches)]


def _part(kind: PartKind, stage: int, submesh: int) -> PartProgram:
    """A part with no ops, that takes over the weights it updates."""
    sums = (Accumulator("%1", 0, "sum", ""),) if kind is _B else ()
    part = Part(
        kind, stage, submesh, Graph(f"{kind.value}{stage}", (), (), ()), (), accumulators=sums
    )
    return PartProgram(part, Listing(Block((), (), ()), (), ()), (0,) if kind is _U else ())


def any_submeshes(seed: int, count: int) -> tuple[int, list[tuple[int, ...]]]:
    """A number of processes, and for each submesh the process of each of its two devices.

    Submeshes are within processes, over two of them, or several in one.
    """
    rng = random.Random(seed)
    each = rng.choice([1, 2, 4])
    devices = range(2 * count)
    owners = [d // each for d in devices]
    if rng.random() < 0.3:
        rng.shuffle(owners)
    return max(owners) + 1, [tuple(owners[2 * s : 2 * s + 2]) for s in range(count)]
