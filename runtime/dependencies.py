"""Which instructions wait for which: who wrote the registers that each of them reads."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.program import Instruction, Program, Run, Send, Start

_Place = tuple[int, int]  # submesh, register


def makers(program: Program) -> tuple[tuple[int, ...], ...]:
    """For each instruction those whose results it reads, in order; feeds are none."""
    writer: dict[_Place, int] = {}
    found: list[tuple[int, ...]] = []
    for number, step in enumerate(program.instructions):
        read = {writer[p] for p in _reads(step, program) if p in writer}
        found.append(tuple(sorted(read)))
        writer.update((place, number) for place in _writes(step, program))
    return tuple(found)


def _reads(step: Instruction, program: Program) -> Iterator[_Place]:
    if isinstance(step, Run):
        submesh = program.submesh_of(step)
        yield from ((submesh, r) for r in (*step.inputs, *step.accumulators))
    elif isinstance(step, Send):
        yield from ((step.source, p.source) for p in step.parcels)


def _writes(step: Instruction, program: Program) -> Iterator[_Place]:
    if isinstance(step, Run):
        submesh = program.submesh_of(step)
        yield from ((submesh, r) for r in (*step.outputs, *step.accumulators))
    elif isinstance(step, Send):
        yield from ((step.target, p.target) for p in step.parcels)
    elif isinstance(step, Start):
        yield from ((step.submesh, r) for r in step.registers)
