"""Compiles a job in a process of its own and reads what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from autopar.cost.hlo import read_collectives
from autopar.cost.timeline import read_timeline
from autopar.ir.compiled import Compiled, CompiledCollective
from autopar.runtime.aot.job import Job

# No device is opened, no server asked, no lock taken and nothing logged.
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}


def compile_ahead(job: Job, seconds: float = 600.0) -> Compiled:
    """What the target's compiler makes of a job; stopped after `seconds`."""
    with tempfile.TemporaryDirectory(prefix="autopar-aot-") as name:
        folder = Path(name)
        job.write(folder)
        command = [sys.executable, "-m", "autopar.runtime.aot.child", str(folder)]
        done = subprocess.run(
            command, env={**os.environ, **_QUIET}, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        return read_answer(job, folder)


def read_answer(job: Job, folder: Path) -> Compiled:
    """The figures that the compiler left in a job's folder."""
    answer = json.loads((folder / "answer.json").read_text())
    found = tuple(
        CompiledCollective(c.kind, (), c.dtype, c.nbytes, c.trips, c.op_name, c.source)
        for c in read_collectives((folder / "hlo.txt").read_text())
    )
    dumps = sorted((folder / "dump").glob("*.schedule.txt"))
    timeline = read_timeline(dumps[0].read_text()) if dumps else None
    return Compiled(
        target=str(job.target),
        compiler=answer["compiler"],
        argument_bytes=answer["argument_bytes"],
        peak_bytes=answer["peak_bytes"],
        collectives=found,
        seconds=timeline.seconds if timeline else None,
        exposed_seconds=timeline.exposed_seconds if timeline else None,
    )
