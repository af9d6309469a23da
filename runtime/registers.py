"""What each register holds, found by walking the instructions once before they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.errors import GraphError
from autopar.ir.mesh import MeshShape
from autopar.ir.program import Fetch, Program, Run, Send, Start
from autopar.runtime.arrays import ArrayType
from autopar.runtime.feeds import FeedType
from autopar.runtime.parts import PartSource, dtype_of, held_in
from autopar.runtime.send import Way

Place = tuple[int, int]  # submesh, register


@dataclass
class RegisterTypes:
    """The types that a walk found: of sends by instruction, of starts, and at the end of all."""

    held: dict[Place, ArrayType] = field(default_factory=dict[Place, ArrayType])
    ways: dict[int, tuple[Way, ...]] = field(default_factory=dict[int, tuple[Way, ...]])
    starts: dict[int, tuple[ArrayType, ...]] = field(
        default_factory=dict[int, tuple[ArrayType, ...]]
    )

    def of_fetch(self, fetch: Fetch) -> ArrayType:
        """What the registers of an output hold; raises GraphError where nothing is there."""
        return self.read(fetch.submesh, fetch.registers[0], f"output {fetch.output}")

    def read(self, submesh: int, register: int, reader: str) -> ArrayType:
        """What a register holds when `reader` comes to it."""
        if (submesh, register) not in self.held:
            raise GraphError(f"{reader} reads r{register} of mesh{submesh}, which holds nothing")
        return self.held[submesh, register]


def register_types(
    program: Program,
    sources: Sequence[PartSource],
    feeds: Iterable[FeedType],
    meshes: Sequence[MeshShape],
) -> RegisterTypes:
    """Walks the list with types in place of arrays.

    Raises GraphError where an instruction reads a register that holds nothing, or not what it is
    compiled for, and where a send would have to combine partial sums.
    """
    types = RegisterTypes()
    for f in feeds:
        types.held.update(((f.feed.submesh, r), f.kind) for r in f.feed.registers)
    for number, step in enumerate(program.instructions):
        if isinstance(step, Run):
            _run(step, program, sources[step.part], types)
        elif isinstance(step, Send):
            types.ways[number] = _send(step, meshes, types)
        elif isinstance(step, Start):
            kinds = types.starts[number] = _start(step, meshes[step.submesh])
            places = ((step.submesh, r) for r in step.registers)
            types.held.update(zip(places, kinds, strict=True))
        else:
            for register in step.registers:
                types.held.pop((step.submesh, register), None)
    return types


def _run(run: Run, program: Program, source: PartSource, types: RegisterTypes) -> None:
    submesh, name = program.parts[run.part].part.submesh, source.name
    expected = zip(
        (*run.inputs, *run.accumulators), (*source.inputs, *source.accumulators), strict=True
    )
    for register, wanted in expected:
        held = types.read(submesh, register, name)
        if held != wanted:
            raise GraphError(
                f"{name} is compiled for {wanted} in r{register} of mesh{submesh}, "
                f"which holds {held}"
            )
    places = ((submesh, register) for register in run.outputs)
    types.held.update(zip(places, source.outputs, strict=True))


def _send(send: Send, meshes: Sequence[MeshShape], types: RegisterTypes) -> tuple[Way, ...]:
    ways: list[Way] = []
    for parcel in send.parcels:
        name = f"the send of {parcel.value.type_text} {parcel.value.name}"
        held = types.read(send.source, parcel.source, name)
        before, after = (
            ArrayType.lying(parcel.value.shape, held.dtype, s, meshes[m])
            for s, m in ((parcel.before, send.source), (parcel.after, send.target))
        )
        if before.shape != after.shape or len(parcel.before.partial) != len(parcel.after.partial):
            raise GraphError(f"{name} from {parcel.before} to {parcel.after} would have to combine")
        if held != before:
            raise GraphError(f"{name} is of {before}, but r{parcel.source} holds {held}")
        ways.append(Way(before, after))
        types.held[send.target, parcel.target] = after
    return tuple(ways)


def _start(start: Start, mesh: MeshShape) -> tuple[ArrayType, ...]:
    return tuple(
        held_in(a.dtype, ArrayType.lying(v.shape, dtype_of(v.dtype), s, mesh))
        for a, v, s in zip(start.accumulators, start.values, start.shardings, strict=True)
    )
