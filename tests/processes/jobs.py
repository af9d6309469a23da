"""Starts jobs of several processes on this machine, each with a few virtual devices of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.processes import worker

LIMIT_SECONDS = 300.0  # for the whole job, on a machine that does much else
_RESULT = "RESULT "
_MODELS = ("tests.fuzz.case", "tests.zoo", "tests.zoo.staged")  # that scenarios take


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, what it said, and when."""

    code: int
    said: str
    seconds: float

    @property
    def result(self) -> Any:
        """The result of its scenario."""
        lines = [line for line in self.said.splitlines() if line.startswith(_RESULT)]
        assert lines, f"exit {self.code}:\n{self.said[-4000:]}"
        return json.loads(lines[-1].removeprefix(_RESULT))


def _workers(count: int, devices: int) -> list[subprocess.Popen[str]]:
    """A process for each number below the count, which waits for scenarios to run."""
    words = [str(count), str(devices), str(_free_port())]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.worker", str(n), *words],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(count)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _named(scenario: str) -> str:
    return scenario if ":" in scenario else f"tests.processes.scenarios:{scenario}"


def start(count: int, devices: int, scenario: str, *texts: str) -> list[subprocess.Popen[str]]:
    """A process for each number below the count; every one runs the scenario, and ends."""
    processes = _workers(count, devices)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps([_named(scenario), *texts]) + "\n")
        process.stdin.close()
        process.stdin = None
    return processes


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """Wait for all processes, and leave none running."""
    begin = time.monotonic()
    found: list[Ended] = []
    try:
        for process in processes:
            said, _ = process.communicate(timeout=LIMIT_SECONDS)
            found.append(Ended(process.returncode, said, time.monotonic() - begin))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


def results(count: int, devices: int, scenario: str, *texts: str) -> list[Any]:
    """The result of a scenario in every process of a job."""
    return [process.result for process in ends(start(count, devices, scenario, *texts))]


class BrokenJob(Exception):
    """Processes of a job ended, or hung, in a scenario; `is_hung` tells which.

    What each said comes in the order in which they ended: others fail of the first.
    """

    def __init__(self, is_hung: bool, said: Sequence[str]) -> None:
        how = "it hangs" if is_hung else "a process ended"
        super().__init__("\n".join([f"{how}:", *said]))
        self.is_hung = is_hung


class StandingJob:
    """A job whose processes have started and wait: they run scenarios, one after the other.

    They are forked from a process that has imported what scenarios import, and has no JAX devices
    yet: that takes a process longer than most scenarios.
    """

    def __init__(self, count: int, devices: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [Path(self._folder.name) / f"process-{n}.log" for n in range(count)]
        self._workers: list[tuple[ForkServerProcess, Connection]] = []
        words = count, devices, _free_port(), dict(os.environ)
        for number, log in enumerate(self._logs):
            log.write_text("")
            asked, theirs = multiprocessing.Pipe()
            process = _forks().Process(target=worker.serve, args=(theirs, log, number, *words))
            process.start()
            theirs.close()
            self._workers.append((process, asked))

    def results(self, scenario: str, *texts: str, limit: float = LIMIT_SECONDS) -> list[Any]:
        """The result of a scenario in every process; raises BrokenJob where one gives none."""
        found: dict[int, Any] = {}
        waiting: dict[Any, int] = {}
        ended: list[int] = []
        for number, (_, asked) in enumerate(self._workers):
            try:
                asked.send([_named(scenario), *texts])
                waiting[asked] = number
            except OSError:
                ended.append(number)
        end = time.monotonic() + limit
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for told in ready:
                number = waiting.pop(told)
                try:
                    found[number] = json.loads(self._workers[number][1].recv())
                except (EOFError, OSError):
                    ended.append(number)
        if silent := [*ended, *waiting.values()]:
            self._kill()
            said = ((n, self._logs[n].read_text(errors="replace")) for n in silent)
            broken = BrokenJob(bool(waiting), [f"process {n}:\n{log[-4000:]}" for n, log in said])
            self.close()
            raise broken
        return [found[number] for number in range(len(self._workers))]

    def close(self) -> None:
        """End its processes."""
        self._kill()
        for _, asked in self._workers:
            asked.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()


def _forks() -> ForkServerContext:
    """What forks processes that have imported what most scenarios import."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        ["autopar.api", "autopar.step", "tests.processes.scenarios", *_MODELS]
    )
    return found


@contextmanager
def standing_job(count: int, devices: int) -> Generator[StandingJob]:
    """A job that stands for as long as it is used."""
    job = StandingJob(count, devices)
    try:
        yield job
    finally:
        job.close()
