"""Planned steps in processes of their own, where this one shows other devices than a plan has.

this process                    each process
starts it with words of its own builds its step
arguments  --- stdin --->       runs it
results    <-- stdout ---       answers, until nobody asks
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar.errors import VerifyError
from autopar.runtime.aot.program import AotProgram
from autopar.runtime.validation.steps import FlatStep, packed, unpacked

# Each process finds modules where this one does; nothing else of it is taken over.
_START = "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from {0} import {1}; {1}()"
_TOLD = 3000  # characters of what a process said, in an error

Ask = Callable[[Sequence[Any]], list[Any]]  # flat host arrays to the answer of each process


@contextmanager
def asked_processes(
    module: str, main: str, words: Sequence[Sequence[str]], where: Sequence[str]
) -> Generator[Ask]:
    """The answers of processes to flat host arrays, while this lasts: one for each list of words.

    Each runs `main` of a module, which finds its words in `sys.argv[2:]` and calls `answer_calls`.
    Calls raise VerifyError where one gave up, with `where` that one ran and what it said.
    """
    program = _START.format(module, main)
    with tempfile.TemporaryDirectory(prefix="autopar-processes-") as name:
        logs = [Path(name) / f"stderr{n}.txt" for n in range(len(words))]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for own, log in zip(words, logs, strict=True):
                command = [sys.executable, "-P", "-c", program, json.dumps(sys.path), *own]
                with log.open("wb") as said:
                    pipe = subprocess.PIPE
                    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said)
                started.append(process)
            yield lambda leaves: _asked(started, logs, where, leaves)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.communicate()


def _asked(
    processes: Sequence[subprocess.Popen[bytes]],
    logs: Sequence[Path],
    where: Sequence[str],
    leaves: Sequence[Any],
) -> list[Any]:
    found: list[Any] = []
    given = pickle.dumps([packed(leaf) for leaf in leaves])
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(given)
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            found.append(pickle.load(process.stdout))
    except (OSError, EOFError, pickle.UnpicklingError):
        number = len(found)
        said = logs[number].read_text(errors="replace").strip()
        raise VerifyError(
            f"the planned step did not run {where[number]}:\n{said[-_TOLD:]}"
        ) from None
    return found


def answer_calls(run: Callable[[list[Any]], Any]) -> None:
    """Answer with what `run` makes of the arrays that come on stdin, until nobody asks."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a step may print
    while True:
        try:
            leaves = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(run([unpacked(leaf) for leaf in leaves]), answers)
        answers.flush()


@contextmanager
def remote_step(program: AotProgram, constants: Sequence[Any]) -> Generator[FlatStep]:
    """The step of a program for CPU devices as a function of flat host arrays, while this lasts.

    `constants` are its last arguments. Calls raise VerifyError where the process gave up.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-validation-") as folder:
        program.write(Path(folder))
        child = ("autopar.runtime.validation.child", "main", [[folder]], ["on CPU devices"])
        with asked_processes(*child) as ask:
            yield lambda leaves: [unpacked(leaf) for leaf in ask([*leaves, *constants])[0]]
