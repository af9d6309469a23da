"""No job waits for ever: its walks are proven so on plain data, and a fault in them is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import JobError
from autopar.ir.program import Free, Instruction, Run, Send, Start
from autopar.ir.projection import Walk, paired, transfer_id, walks
from autopar.ir.sharding import Sharding
from autopar.passes.lower.projections import Transports, verify_projections
from tests.processes.programs import any_program, any_submeshes

SAMPLED = 250  # of the seeds; all of 1,000 were run, and faults found in each


def job(seed: int, asks_all: bool) -> tuple[Any, list[frozenset[int]], list[Walk]]:
    program = any_program(seed)
    count, owners = any_submeshes(seed, len(program.submeshes))
    submeshes = [frozenset(own) for own in owners]
    return program, submeshes, walks(program, count, submeshes, asks_all)


@pytest.mark.parametrize("asks_all", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_what_is_projected_from_one_list_never_waits_for_ever(asks_all: bool, limit: int) -> None:
    for seed in range(30):
        verify_projections(*job(seed, asks_all), Transports(asks_all, limit))


def swapped(walk: Walk, rng: random.Random) -> Walk:
    at = rng.randrange(len(walk) - 1)
    return (*walk[:at], walk[at + 1], walk[at], *walk[at + 2 :])


def dropped(walk: Walk, rng: random.Random) -> Walk:
    at = rng.randrange(len(walk))
    return (*walk[:at], *walk[at + 1 :])


def doubled(walk: Walk, rng: random.Random) -> Walk:
    at = rng.randrange(len(walk))
    to = rng.randint(at, len(walk))
    return (*walk[:to], walk[at], *walk[to:])


def reordered(walk: Walk, rng: random.Random) -> Walk:
    """One goes elsewhere."""
    at = rng.randrange(len(walk))
    rest = (*walk[:at], *walk[at + 1 :])
    to = rng.choice([n for n in range(len(walk)) if n != at])
    return (*rest[:to], walk[at], *rest[to:])


def mislaid(walk: Walk, rng: random.Random) -> Walk:
    """A value lies otherwise, in another register, or goes elsewhere, in one process."""
    sends = [at for at, (_, step) in enumerate(walk) if isinstance(step, Send)]
    at = rng.choice(sends or range(len(walk)))
    number, step = walk[at]
    return (*walk[:at], (number, _otherwise(step, rng)), *walk[at + 1 :])


def _otherwise(step: Instruction, rng: random.Random) -> Instruction:
    if isinstance(step, Send):
        (transfer,) = step.transfers
        return rng.choice(
            [
                replace(step, transfers=(replace(transfer, after=Sharding((("data",), ()))),)),
                replace(step, transfers=(replace(transfer, before=Sharding(((), ("data",)))),)),
                replace(step, transfers=(replace(transfer, target=transfer.target + 1),)),
                replace(step, transfers=(replace(transfer, source=transfer.source + 1),)),
                replace(step, transfers=(transfer, transfer)),
            ]
        )
    if isinstance(step, Run):
        return replace(step, inputs=(*step.inputs, 0))
    assert isinstance(step, Start | Free)
    return replace(step, registers=(*step.registers, 0))


PLANTED: list[Callable[[Walk, random.Random], Walk]] = [
    swapped, dropped, doubled, reordered, mislaid
]  # fmt: skip


def is_found(seed: int) -> bool:
    """True if a fault that the seed plants in one process is found there."""
    rng = random.Random(seed)
    asks_all = rng.random() < 0.5
    program, submeshes, own = job(rng.randrange(40), asks_all)
    process = rng.choice([p for p, walk in enumerate(own) if len(walk) > 1])
    planted = [*own]
    planted[process] = PLANTED[seed % len(PLANTED)](own[process], rng)
    try:
        verify_projections(program, submeshes, planted, Transports(asks_all, rng.randint(0, 3)))
    except JobError as error:
        return f"process {process} " in str(error)
    return False


def test_a_planted_fault_is_found_and_its_process_named() -> None:
    missed = [seed for seed in range(SAMPLED) if not is_found(seed)]
    assert not missed


def test_two_that_send_to_each_other_in_turned_order_wait_in_a_circle() -> None:
    """Each has a send at the head of its queue that the other comes to later."""
    program, submeshes = any_program(3, 2, 1, 4), [frozenset({0}), frozenset({1})]
    first, second = walks(program, 2, submeshes)
    sends = [at for at, (_, step) in enumerate(second) if isinstance(step, Send)]
    turned = list(second)
    turned.insert(sends[0], turned.pop(sends[-1]))  # its last gradient before its first activation
    with pytest.raises(JobError, match="wait for one another for ever: instruction") as told:
        verify_projections(program, submeshes, [first, tuple(turned)], Transports())
    last = second[sends[-1]][0]
    circle = str(told.value).splitlines()[1]
    assert f"instruction {last}" in circle
    assert f"after instruction {last}; the list has it before" in str(told.value)


def test_thousands_of_processes_are_few_walks() -> None:
    """4,096 processes, 16 stages: every process of a stage walks the very same object."""
    program = any_program(0, 16, 1, 8)
    submeshes = [frozenset(range(256 * s, 256 * (s + 1))) for s in range(16)]
    own = walks(program, 4096, submeshes, asks_all=True)
    assert len({id(walk) for walk in own}) == 16
    verify_projections(program, submeshes, own, Transports(asks_all=True, limit=16))
    own[2049] = swapped(own[2049], random.Random(0))
    with pytest.raises(JobError, match="process 2049 walks instruction"):
        verify_projections(program, submeshes, own, Transports(asks_all=True, limit=16))


def test_devices_that_no_process_has_are_told() -> None:
    program, submeshes, own = job(0, asks_all=False)
    with pytest.raises(JobError, match="submesh 0 is on process 77 of"):
        verify_projections(program, [frozenset({77}), *submeshes[1:]], own)


def test_each_target_device_gets_one_piece() -> None:
    assert paired("abcd", "wxyz") == [("a", "w"), ("b", "x"), ("c", "y"), ("d", "z")]
    assert paired("ab", "wxyz") == [("a", "w"), ("a", "x"), ("b", "y"), ("b", "z")]
    assert paired("abcd", "wx") == [("a", "w"), ("c", "x")]


def test_numbers_of_transfers_are_all_different() -> None:
    ids = {transfer_id(e, g, c) for e in (0, 1, 2**20 - 1) for g in (0, 2**16 - 1) for c in (0, 7)}
    assert len(ids) == 12
    assert max(ids) < 2**64
