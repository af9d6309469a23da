"""A process that is killed, raises, or is unlike the others is named by them, and all end."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import autopar
from autopar.runtime.job import Job
from autopar.runtime.watch import Watch
from tests.processes.jobs import ends, start
from tests.processes.scenarios import batches, create, train
from tests.processes.test_job import Shared

WITHIN_SECONDS = 15.0


class Watching:
    """The watches of a job whose processes are threads, and what each would have ended with."""

    def __init__(self, count: int) -> None:
        store = Shared()
        self.ended: list[list[str]] = [[] for _ in range(count)]
        self.watches: list[Watch] = []
        for n in range(count):
            job = Job(n, count, store)
            self.watches.append(Watch(job, self.ended[n].append))

    def settled(self, wanted: list[int]) -> bool:
        """True once so many words have come to each, and no more."""
        end = time.monotonic() + 10
        while time.monotonic() < end and [len(e) for e in self.ended] != wanted:
            time.sleep(0.01)
        return [len(e) for e in self.ended] == wanted


@pytest.fixture(name="three")
def _three() -> Iterator[Watching]:
    watching = Watching(3)
    yield watching
    for watch in watching.watches:
        watch.close()
    end = time.monotonic() + 10
    while time.monotonic() < end and any("_listen" in t.name for t in threading.enumerate()):
        time.sleep(0.01)


@pytest.mark.parametrize("index", range(3))
def test_all_others_hear_who_raised_what(three: Watching, index: int) -> None:
    three.watches[index].fail("raised ValueError: a bad row")
    assert three.settled([int(n != index) for n in range(3)])
    for n, told in enumerate(three.ended):
        if n != index:
            (text,) = told
            assert text.startswith(f"process {index} of 3 raised ValueError: a bad row")


@pytest.mark.parametrize("index", range(3))
def test_who_plans_while_the_others_go_on_is_told_so(three: Watching, index: int) -> None:
    """Another batch shape in one process: it asks for a plan, and nobody else does."""
    for watch in three.watches:
        watch.ask("the plan of train, with batch f32[16,8]")
        watch.call()
    three.watches[index].ask("the plan of train, with batch f32[12,8]")
    for n, watch in enumerate(three.watches):
        if n != index:
            watch.call()
    end = time.monotonic() + 10
    while time.monotonic() < end and not all(three.ended):
        time.sleep(0.01)
    assert all("with batch f32[12,8] there" in told[0] for told in three.ended)


def test_who_comes_late_hears_what_was_asked() -> None:
    """Process 0 asks before the other has connected."""
    store, ended = Shared(), list[str]()
    first = Watch(Job(0, 2, store), ended.append)
    first.ask("the plan of train, with batch f32[12,8]")
    second = Watch(Job(1, 2, store), ended.append)
    end = time.monotonic() + 10
    while time.monotonic() < end and not ended:
        second.call()
        time.sleep(0.01)
    second.close()
    assert any("with batch f32[12,8] there" in told for told in ended)


def test_who_asks_later_is_waited_for(three: Watching) -> None:
    for watch in three.watches:
        watch.ask("a plan")
        time.sleep(0.05)
    for watch in three.watches:
        watch.call()
        time.sleep(0.05)
    assert three.ended == [[], [], []]


@pytest.mark.parametrize("index", range(3))
def test_who_says_goodbye_is_not_missed(three: Watching, index: int) -> None:
    three.watches[index].close()
    time.sleep(0.2)
    assert three.ended == [[], [], []]


def said_first_step(process: subprocess.Popen[str]) -> None:
    """Wait until a process tells of its first step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("FIRST"):
            return
    raise AssertionError(f"it ended with {process.wait()}")


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_killed_process_is_named(stages: str) -> None:
    processes = start(2, 1, "endless", stages, "nobody")
    try:
        for process in processes:
            said_first_step(process)
    finally:
        processes[1].kill()
    survivor, _ = ends(processes)
    assert survivor.code not in (0, None)
    assert survivor.seconds < WITHIN_SECONDS
    assert "process 1 of 2 was lost" in survivor.said


@pytest.mark.ci
def test_a_process_that_raises_is_named() -> None:
    survivor, failed = ends(start(2, 1, "endless", "2", "1"))
    assert "ValueError: a bad row" in failed.said
    assert "process 1 of 2 raised ValueError: a bad row" in survivor.said
    assert 0 not in (failed.code, survivor.code)


@pytest.mark.ci
def test_a_step_that_hangs_ends_all_processes() -> None:
    """Process 1 waits for its data for ever, and process 0 in the step for process 1."""
    waits, guilty = ends(start(2, 1, "endless", "2", "nobody", "1"))
    assert 0 not in (waits.code, guilty.code)
    assert "a step has made no progress for 2.00 s:" in waits.said
    assert "HANGS in B0.0, or waits for what mesh1 sends to it" in waits.said
    assert "process 0 of 2 stands still: a step has made no progress" in guilty.said
    assert re.search(r"scenarios.py\", line \d+ in endless", guilty.said)  # where it is


@pytest.mark.slow
def test_without_the_first_nobody_goes_on() -> None:
    processes = start(2, 1, "endless", "1", "nobody")
    try:
        for process in processes:
            said_first_step(process)
    finally:
        processes[0].kill()
    _, survivor = ends(processes)
    assert survivor.code != 0
    assert survivor.seconds < WITHIN_SECONDS


UNLIKE = {
    "plan": "the hash of the plan given is",
    "JAX": "JAX is 0.0.1 in process 1 and",
    "batch": "the list of arguments is",
}


@pytest.mark.parametrize(
    "what", ["plan", *(pytest.param(w, marks=pytest.mark.slow) for w in ("JAX", "batch"))]
)
def test_what_is_not_alike_in_all_is_told_by_each(what: str, tmp_path: Path) -> None:
    files = [tmp_path / "dp.json", tmp_path / "fsdp.json"]
    state = jax.eval_shape(create, jax.random.key(0))
    for path in files:
        autopar.plan(train, state, batches()[0], cluster="2xcpu", method=path.stem).save(path)
    for process in ends(start(2, 1, "unlike", what, *map(str, files))):
        assert process.code != 0
        assert "JobError: the processes of this job do not agree on" in process.said
        assert UNLIKE[what] in process.said
