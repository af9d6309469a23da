"""The processes of a job agree, or all stop and say why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from autopar.errors import InfeasibleError, JobError
from autopar.runtime.job import Job, own_address


class Shared:
    """A store as JAX's, in this process."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._news = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self._news:
            assert key not in self._held
            self._held[key] = value
            self._news.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        end = time.monotonic() + timeout_in_ms / 1e3
        with self._news:
            while key not in self._held:
                if not self._news.wait(end - time.monotonic()):
                    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody set it")
            return self._held[key]


def all_run(count: int, act: Callable[[Job], Any], limit: float = 30.0) -> list[Any]:
    """What an act gives, or raises, in each process of a job."""
    store = Shared()

    def one(index: int) -> Any:
        try:
            return act(Job(index, count, store, limit))
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_equal_facts_go_on() -> None:
    assert all_run(3, lambda job: job.agree("a plan", {"JAX": "0.10"})) == [None] * 3


def test_a_difference_stops_all_and_tells_both_values() -> None:
    def act(job: Job) -> None:
        job.agree("a plan", {"the order of devices": "0, 1", "JAX": f"0.1{job.index // 2}"})

    told = all_run(3, act)
    assert told == [told[0]] * 3
    assert "JAX is 0.11 in process 2 and 0.10 in process 0" in told[0]


def test_who_does_not_come_is_named() -> None:
    def act(job: Job) -> None:
        if job.index != 2:
            job.agree("the plan of train", {})

    told = all_run(4, act, 0.3)
    assert "process 2 of 4 did not come to the plan of train within 0.3 s" in told[0]
    assert told == [told[0], told[0], None, told[0]]


def test_the_first_makes_a_text_for_all() -> None:
    text = "x" * 3_000_000
    assert all_run(2, lambda job: job.from_first("the plan", lambda: text)) == [text] * 2


def test_all_hear_why_the_first_makes_none() -> None:
    def fail() -> str:
        raise InfeasibleError("too big by 3 GiB")

    def act(job: Job) -> str:
        try:
            return job.from_first("the plan", fail)
        except InfeasibleError as error:
            return str(error)

    mine, theirs = all_run(2, act)
    assert mine == "too big by 3 GiB"
    assert theirs == "process 0 could not make the plan: InfeasibleError: too big by 3 GiB"


@pytest.mark.parametrize("coordinator", ["127.0.0.1:1234", "localhost:1234"])
def test_a_job_on_one_machine_stays_on_it(coordinator: str) -> None:
    assert own_address(coordinator) in ("127.0.0.1", "[::1]")
