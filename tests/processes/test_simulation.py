"""The executor of each process of a job under any delay, order, loss or death, by a seed."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from autopar.runtime.actions import Binding
from tests.processes.programs import any_program, any_submeshes
from tests.processes.simulation import Fault, Job

SAMPLED = 80  # of the seeds


def simulated(seed: int) -> Job:
    """A small job: its program, processes, transport, window, and who dies if anybody does."""
    rng = random.Random(seed)
    program = any_program(seed, microbatches=rng.randint(1, 2))
    count, owners = any_submeshes(seed, len(program.submeshes))
    dead = rng.randrange(count) if rng.random() < 0.3 else None
    return Job(program, count, owners, rng.random() < 0.5, rng.choice([0, 1, 2, 16]), dead)


def test_in_any_order_of_events_each_step_gives_what_its_list_says() -> None:
    for seed in range(SAMPLED):
        simulated(seed).run(seed)


def faults_of(seeds: int) -> list[str]:
    """What goes wrong in some runs."""
    found: list[str] = []
    for seed in range(seeds):
        try:
            simulated(seed).run(seed)
        except Fault as error:
            found.append(str(error))
    return found


def test_what_the_next_step_consumes_must_be_copied_before_it_is_sent() -> None:
    """The simulation sees the fault that the copies are there for."""
    with mock.patch.object(Binding, "_lasting", return_value=[]):
        assert any("is wrong in process" in fault for fault in faults_of(20))


def test_who_leaves_out_a_send_is_waited_for_for_ever() -> None:
    job = Job(any_program(1, 2, 1, 2), 2, [(0, 0), (1, 1)], asks_all=False, limit=2, forgetful=0)
    with pytest.raises(Fault, match=r"processes \[1\] wait for ever|raises"):
        job.run(1)


def test_a_seed_is_a_run() -> None:
    assert simulated(7).run(7) == simulated(7).run(7) != simulated(7).run(8)
