"""Worker processes that run cases one after the other; one that dies or hangs is replaced.

A worker reads a line of JSON for each case and writes one with its outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compiling import XLA_FLAGS
from tests.fuzz.case import Outcome

ROOT = Path(__file__).parents[2]
PATIENCE = 5
CASES_EACH = 60  # compiled programs pile up in a process


@dataclass(frozen=True)
class Task:
    """A case as plain data: a program, or the seed of one, and a config, or the number of one."""

    seed: int
    number: int
    program: dict[str, Any] | None = None
    config: dict[str, Any] | None = None

    def as_line(self) -> str:
        """It as a line of JSON."""
        return json.dumps([self.seed, self.number, self.program, self.config])


@dataclass(frozen=True)
class Done:
    """A case with its outcome, its config and its program's op kinds."""

    task: Task
    outcome: Outcome
    config: dict[str, Any]
    kinds: tuple[str, ...]


class Worker:
    """One process, and the thread that reads what it writes."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        env["XLA_FLAGS"] = XLA_FLAGS
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker"], cwd=ROOT, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._cases = 0
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    @property
    def is_used_up(self) -> bool:
        """Whether it died, or did as many cases as one process should."""
        return self._process.poll() is not None or self._cases >= CASES_EACH

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-30:], line]

    def run(self, task: Task, limit: float) -> Done:
        """The outcome of a case; the process is gone after one that hangs or crashes it."""
        assert self._process.stdin is not None
        self._cases += 1
        given = task.config or {}
        try:
            self._process.stdin.write(task.as_line() + "\n")
            self._process.stdin.flush()
            line = self._answer(limit)
        except BrokenPipeError:
            line = ""
        if line is None:
            self.end()
            text = f"no answer after {limit:.0f} s of work, or {PATIENCE} times that by the clock"
            return Done(task, Outcome("hang", "", text, limit), given, ())
        if not line:
            code = self._process.wait()
            detail = "".join(self._errors[-12:])
            return Done(task, Outcome("CRASH", f"exit {code}", detail), given, ())
        data = json.loads(line)
        made = data["outcome"] | {"primitives": tuple(data["outcome"]["primitives"])}
        return Done(task, Outcome(**made), data["config"], tuple(data["kinds"]))

    def _answer(self, limit: float) -> str | None:
        """The next line, or None after so much work: a busy machine makes no case a hang."""
        began, worked = time.monotonic(), self._worked()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=2)
            spent = time.monotonic() - began
            if spent > PATIENCE * limit or self._worked() - worked > limit:
                return None

    def _worked(self) -> float:
        """Seconds that the process has worked, where the system tells; 0 where it does not."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def run_all(
    tasks: Iterable[Task], jobs: int, limit: float, seconds: float | None = None
) -> Iterator[Done]:
    """Every case that starts within `seconds`, by so many processes, as they get ready."""
    stop = None if seconds is None else time.monotonic() + seconds
    left: queue.Queue[Task] = queue.Queue()
    for task in tasks:
        left.put(task)
    done: queue.Queue[Done | None] = queue.Queue()

    def work() -> None:
        worker: Worker | None = None
        while True:
            try:
                task = left.get_nowait()
            except queue.Empty:
                break
            if stop is not None and time.monotonic() > stop:
                break
            if worker is not None and worker.is_used_up:
                worker.end()
                worker = None
            worker = worker or Worker()
            done.put(worker.run(task, limit))
        if worker is not None:
            worker.end()
        done.put(None)

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    working = jobs
    while working:
        found = done.get()
        if found is None:
            working -= 1
        else:
            yield found
