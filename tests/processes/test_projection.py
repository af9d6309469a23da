"""Each process runs its part of the one list, and all parts together are the list."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from autopar.ir.program import Program, Run, Send
from autopar.ir.projection import Host
from autopar.ir.sharding import MeshShape
from tests.runtime.stages import Builder, Model, one_forward_one_backward

STAGES = 4


@pytest.fixture(scope="module", name="program")
def _program() -> Program:
    model = Model(layers=STAGES, skip=True)
    graph = model.trace(4).part.graph
    meshes = tuple(MeshShape.of((2,)) for _ in range(STAGES))
    return Builder(graph, STAGES, 4, meshes, 4, one_forward_one_backward).program()


def hosts(seed: int) -> list[Host]:
    """Four submeshes of two devices, dealt out to one to eight processes."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 4, 8])
    each = 2 * STAGES // count
    submeshes = tuple(frozenset({(2 * s) // each, (2 * s + 1) // each}) for s in range(STAGES))
    return [Host(index, count, submeshes) for index in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_everybody_concerned_runs_an_instruction_and_nobody_else(
    program: Program, seed: int
) -> None:
    everyone = hosts(seed)
    mine = {h.index: set(h.numbers(program)) for h in everyone}
    for n, step in enumerate(program.instructions):
        concerned = set(everyone[0].submeshes[program.submesh_of(step)])
        if isinstance(step, Send):
            concerned |= everyone[0].submeshes[step.target]
        assert {index for index, own in mine.items() if n in own} == concerned


@pytest.mark.parametrize("seed", range(8))
def test_a_projection_keeps_the_order_and_reads_what_it_holds(program: Program, seed: int) -> None:
    for host in hosts(seed):
        numbers = host.numbers(program)
        assert all(a < b for a, b in pairwise(numbers))
        own = program.only(numbers)
        held = {(f.submesh, r) for f in program.feeds if host.owns(f.submesh) for r in f.registers}
        for step in own.instructions:
            if isinstance(step, Run):
                submesh = own.submesh_of(step)
                assert {(submesh, r) for r in step.inputs} <= held
                held |= {(submesh, r) for r in (*step.outputs, *step.accumulators)}
            elif isinstance(step, Send) and host.owns(step.target):
                held |= {(step.target, t.target) for t in step.transfers}


def test_a_transport_may_ask_all(program: Program) -> None:
    """Sends within a process are still its own affair."""
    submeshes = (frozenset({0}), frozenset({0}), frozenset({1}), frozenset({2}))
    host = Host(2, 3, submeshes)
    asked = {
        (step.source, step.target)
        for n in host.numbers(program, asks_all=True)
        if isinstance(step := program.instructions[n], Send)
    }
    assert (0, 1) not in asked
    assert (1, 2) in asked
