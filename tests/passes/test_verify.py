"""A program that somebody has broken is refused, and every fault is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.errors import GraphError
from autopar.ir.program import Free, Instruction, PartProgram, Program, Run, Send, Start
from autopar.ir.sharding import Sharding
from autopar.passes.lower.program import verify_program
from tests.passes.loopback import lowered
from tests.passes.steps import Chain


def _program() -> Program:
    chain = Chain(layers=4, clip=True, momentum=True, tied=True)
    batching = chain.batching()
    return lowered(batching, chain.sketch().staged(batching, range(4), "1f1b", 4))[1]


def _find(program: Program, kind: type[Instruction], skip: int = 0) -> int:
    found = [i for i, step in enumerate(program.instructions) if isinstance(step, kind)]
    return found[skip]


def _with(program: Program, *instructions: Instruction) -> Program:
    return replace(program, instructions=instructions)


def _without(program: Program, kind: type[Instruction]) -> Program:
    at = _find(program, kind)
    return _with(program, *program.instructions[:at], *program.instructions[at + 1 :])


def _twice(program: Program, kind: type[Instruction]) -> Program:
    at = _find(program, kind)
    return _with(program, *program.instructions[: at + 1], *program.instructions[at:])


def _swapped(program: Program) -> Program:
    """A send before the run that makes what it sends."""
    steps = list(program.instructions)
    at = next(i for i, s in enumerate(steps) if isinstance(s, Send) and s.microbatch >= 0)
    steps[at - 1], steps[at] = steps[at], steps[at - 1]
    return _with(program, *steps)


def _freed_early(program: Program) -> Program:
    at = _find(program, Free, 4)
    early = program.instructions[at]
    rest = [s for s in program.instructions if s is not early]
    return _with(program, *rest[: at - 4], early, *rest[at - 4 :])


def _fewer_outputs(program: Program) -> Program:
    at = _find(program, Run)
    run = program.instructions[at]
    assert isinstance(run, Run)
    steps = list(program.instructions)
    steps[at] = replace(run, outputs=run.outputs[1:])
    return _with(program, *steps)


def _partial_transfer(program: Program) -> Program:
    at = _find(program, Send, 2)
    send = program.instructions[at]
    assert isinstance(send, Send)
    transfer = send.transfers[0]
    stack = replace(transfer, before=Sharding(transfer.before.dims, ("data",)))
    steps = list(program.instructions)
    steps[at] = replace(send, transfers=(stack, *send.transfers[1:]))
    return _with(program, *steps)


def _donated_too_soon(program: Program) -> Program:
    """A part of the loop takes over a weight that the next microbatch reads."""
    at = next(
        k
        for k, given in enumerate(program.parts)
        if any(i.path for i in given.part.graph.inputs) and given.part.name == "F1"
    )
    parts = list(program.parts)
    place = next(p for p, i in enumerate(parts[at].part.graph.inputs) if i.path.startswith("w"))
    parts[at] = PartProgram(parts[at].part, parts[at].listing, (place,))
    return replace(program, parts=tuple(parts))


def _lost_output(program: Program) -> Program:
    fetch = program.fetches[0]
    steps = [*program.instructions, Free(fetch.submesh, fetch.registers)]
    return _with(program, *steps)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda p: _without(p, Run), r"F0 of microbatch 0 runs 0 times"),
        (lambda p: _twice(p, Run), r"F0 of microbatch 0 runs 2 times"),
        (lambda p: _without(p, Send), r"reads r\d+ of submesh 3, which is not there yet"),
        (lambda p: _twice(p, Send), r"writes r\d+ of submesh 3 a second time"),
        (lambda p: _without(p, Free), r"submesh \d never frees \d registers"),
        (lambda p: _twice(p, Free), r"is freed, but is freed at instruction \d+"),
        (lambda p: _without(p, Start), r"reads r\d+ of submesh 0, which is not there yet"),
        (lambda p: _twice(p, Start), r"writes r\d+ of submesh 0 a second time"),
        (_swapped, r"reads r\d+ of submesh 0, which is not there yet"),
        (_freed_early, r"which is freed at instruction|is freed, but is not there yet"),
        (_fewer_outputs, r"inputs, accumulators and outputs instead of"),
        (_partial_transfer, r"cannot cross as \[-, -\] partial\(data\)"),
        (_donated_too_soon, r"which is taken over at instruction \d+ \(F1\)"),
        (_lost_output, r"the end: reads r\d+ of submesh 0, which is freed"),
        (lambda p: replace(p, register_counts=(3, 3, 3, 3)), r"which has no such register"),
        (lambda p: replace(p, microbatches=5), r"of microbatch 4 runs 0 times"),
        (lambda p: replace(p, microbatches=3), r"for microbatch 3, which there is not"),
    ],
)
def test_a_broken_program_is_refused(broken: Callable[[Program], Program], told: str) -> None:
    program = _program()
    verify_program(program)
    with pytest.raises(GraphError, match=told):
        verify_program(broken(program))
