"""Starts jobs of several processes on this machine, each with a few virtual devices of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LIMIT_SECONDS = 300.0  # for the whole job, on a machine that does much else
_RESULT = "RESULT "


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(count), str(devices), str(port)]
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


def _ask(process: subprocess.Popen[str], scenario: str, texts: Sequence[str]) -> None:
    assert process.stdin is not None
    name = scenario if ":" in scenario else f"tests.processes.scenarios:{scenario}"
    process.stdin.write(json.dumps([name, *texts]) + "\n")
    process.stdin.flush()


def start(count: int, devices: int, scenario: str, *texts: str) -> list[subprocess.Popen[str]]:
    """A process for each number below the count; every one runs the scenario, and ends."""
    processes = _workers(count, devices)
    for process in processes:
        _ask(process, scenario, texts)
        assert process.stdin is not None
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
    """A process of a job ended, or hung, in a scenario; `is_hung` tells which."""

    def __init__(self, is_hung: bool, said: str) -> None:
        super().__init__(f"{'it hangs' if is_hung else 'a process ended'}:\n{said[-4000:]}")
        self.is_hung = is_hung


class StandingJob:
    """A job whose processes have started and wait: they run scenarios, one after the other."""

    def __init__(self, count: int, devices: int) -> None:
        self._processes = _workers(count, devices)

    def results(self, scenario: str, *texts: str, limit: float = LIMIT_SECONDS) -> list[Any]:
        """The result of a scenario in every process; raises BrokenJob where one gives none."""
        hung = threading.Event()

        def stop() -> None:
            hung.set()
            self._kill()

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            for process in self._processes:
                _ask(process, scenario, texts)
            with ThreadPoolExecutor(len(self._processes)) as readers:
                told = list(readers.map(_result, self._processes))
        except BrokenPipeError:
            told = [_result(process) for process in self._processes]
        finally:
            timer.cancel()
        silent = [said for is_result, said in told if not is_result]
        if silent:
            self.close()
            raise BrokenJob(hung.is_set(), max(silent, key=len))
        return [json.loads(said) for _, said in told]

    def close(self) -> None:
        """End its processes."""
        self._kill()
        for process in self._processes:
            process.communicate()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


@contextmanager
def standing_job(count: int, devices: int) -> Generator[StandingJob]:
    """A job that stands for as long as it is used."""
    job = StandingJob(count, devices)
    try:
        yield job
    finally:
        job.close()


def _result(process: subprocess.Popen[str]) -> tuple[bool, str]:
    """True and a process's next result; False and all that it said where it ends without one."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        if line.startswith(_RESULT):
            return True, line.removeprefix(_RESULT)
        said.append(line)
    return False, "".join(said)
