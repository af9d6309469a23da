"""Compiles a job in a process of its own and reads what came of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autopar.ir.compiled import Compiled, Level
from autopar.runtime.aot.answer import is_scheduled, take_schedule
from autopar.runtime.aot.answer import read_answer as read_answer
from autopar.runtime.aot.job import Job
from autopar.runtime.aot.process import run_child


def compile_ahead(job: Job, level: Level = Level.MEMORY, limit_seconds: float = 600.0) -> Compiled:
    """What the target's compiler makes of a job; below FULL it is stopped before code generation.

    All but the times of a TPU's kernels is known by then, in a tenth of the time. A program that
    does not fit is an answer too. Raises VerifyError where the compiler fails, or takes longer than
    the limit.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-aot-") as name:
        return compile_in(Path(name), job, level, limit_seconds)


def compile_in(
    folder: Path, job: Job, level: Level = Level.MEMORY, limit_seconds: float = 600.0
) -> Compiled:
    """The same in a folder that is kept, with all that the compiler wrote; see `read_answer`."""
    # Not one byte of a GPU's code tells anything that its schedule does not.
    is_early = level is not Level.FULL or job.target.platform == "gpu"
    job.write(folder)
    run_child(folder, limit_seconds, lambda: is_early and is_scheduled(folder))
    if not (folder / "answer.json").exists():
        take_schedule(folder)
    return read_answer(job, folder)
