"""Compiles a program in a process of its own, watched and stopped in time, and reads its answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autopar.errors import VerifyError
from autopar.ir.compiled import CheckLevel, Compiled
from autopar.runtime.aot.program import TICKING, AotProgram, is_scheduled, take_schedule
from autopar.runtime.aot.program import read_answer as read_answer


def compile_ahead(
    program: AotProgram, level: CheckLevel = CheckLevel.MEMORY, limit_seconds: float = 600.0
) -> Compiled:
    """Compile a program for its target; below FULL the compiler is stopped before code generation.

    All but the times of a TPU's kernels is known by then, in a tenth of the time. A program that
    does not fit is an answer too. Raises VerifyError where the compiler fails, or takes longer than
    the limit.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-aot-") as name:
        return compile_in(Path(name), program, level, limit_seconds)


def compile_in(
    folder: Path,
    program: AotProgram,
    level: CheckLevel = CheckLevel.MEMORY,
    limit_seconds: float = 600.0,
) -> Compiled:
    """The same in a folder that is kept, with all that the compiler wrote; see `read_answer`.

    A program with loops that have no collective is compiled once more, for their time.
    """
    _compile(folder, program, level, limit_seconds)
    compiled = read_answer(program, folder)
    return time_loops(folder, program, limit_seconds) if compiled.untimed else compiled


def time_loops(folder: Path, program: AotProgram, limit_seconds: float = 600.0) -> Compiled:
    """Compile the program of a folder again with a collective in each loop, for a whole timeline.

    All figures but the times are those of the program itself.
    """
    (folder / TICKING).mkdir()
    _compile(folder / TICKING, replace(program, ticks=True), CheckLevel.MEMORY, limit_seconds)
    return read_answer(program, folder)


def _compile(folder: Path, program: AotProgram, level: CheckLevel, limit_seconds: float) -> None:
    # Not one byte of a GPU's code tells anything that its schedule does not.
    is_early = level is not CheckLevel.FULL or program.target.platform == "gpu"
    program.write(folder)
    run_child(folder, limit_seconds, lambda: is_early and is_scheduled(folder))
    if not (folder / "answer.json").exists():
        take_schedule(folder)


# -- the process -------------------------------------------------------------------------------


_TICK_SECONDS = 0.05
_TOLD = 3000  # characters of what the process said, in an error


def run_child(
    folder: Path, limit_seconds: float, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Compile the program in a folder until the process ends, or `is_enough` of what it wrote.

    Raises VerifyError where it fails or takes longer than the limit.
    """
    command = [sys.executable, "-P", "-m", "autopar.runtime.aot.child", str(folder)]
    said = folder / "stderr.txt"
    with said.open("wb") as log:
        child = subprocess.Popen(
            command, env=_environment(folder), stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = _watched(child, time.monotonic() + limit_seconds, is_enough)
        finally:
            _end(child)
    if code is None:
        raise VerifyError(
            f"the compiler was stopped after {limit_seconds:.0f} s without an answer; give it a "
            "longer limit, or fewer layers to compile"
        )
    if code:
        text = said.read_text(errors="replace").strip()
        raise VerifyError(f"the compiler gave no answer (exit {code}). It said:\n{text[-_TOLD:]}")


def _watched(
    child: subprocess.Popen[bytes], deadline: float, is_enough: Callable[[], bool]
) -> int | None:
    """The exit code, 0 where what was written is enough, or None past the deadline."""
    while time.monotonic() < deadline:
        try:
            return child.wait(_TICK_SECONDS)
        except subprocess.TimeoutExpired:
            if is_enough():
                return 0
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process with all that it started: compilers leave on no gentler word."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself, and alone
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def _environment(folder: Path) -> dict[str, str]:
    """The environment of the process; of the parent's settings only where its modules lie.

    No device is opened, no server asked, no lock taken, and temporary files go into the folder.
    """
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",  # the program says itself how wide each of its values is
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_LOG_DIR": "disabled",
        "TMPDIR": str(folder),
        "NUMBA_CACHE_DIR": str(folder),
        "PATH": os.defpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    # Where a module system keeps libraries of Python itself; unset, it is expanded to its own name.
    libraries = os.path.expandvars("$LD_LIBRARY_PATH")
    return settings if libraries.startswith("$") else {**settings, "LD_LIBRARY_PATH": libraries}
