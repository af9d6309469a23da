"""Starts jobs of several processes on this machine, each with a few virtual devices of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIMIT_SECONDS = 300.0  # for the whole job, on a machine that does much else


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, what it said, and when."""

    code: int
    said: str
    seconds: float

    @property
    def result(self) -> Any:
        """The result of its scenario."""
        lines = [line for line in self.said.splitlines() if line.startswith("RESULT ")]
        assert lines, f"exit {self.code}:\n{self.said[-4000:]}"
        return json.loads(lines[-1].removeprefix("RESULT "))


def start(count: int, devices: int, scenario: str, *texts: str) -> list[subprocess.Popen[str]]:
    """A process for each number below the count; every one runs the scenario."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.processes.worker"),
                *(str(n), str(count), str(devices), str(port), scenario, *texts),
            ],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(count)
    ]


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
