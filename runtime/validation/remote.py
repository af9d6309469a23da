"""A planned step in a process of its own, which has the CPU devices that this one has not."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar.errors import VerifyError
from autopar.runtime.aot.program import AotProgram
from autopar.runtime.validation.steps import FlatStep, packed, unpacked

# The process finds modules where this one does; nothing else of it is taken over.
_START = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[2]); "
    "from autopar.runtime.validation.child import main; main(sys.argv[1])"
)
_TOLD = 3000  # characters of what the process said, in an error


@contextmanager
def remote_step(program: AotProgram, constants: Sequence[Any]) -> Generator[FlatStep]:
    """The step of a program for CPU devices as a function of flat host arrays, while this lasts.

    `constants` are its last arguments. Calls raise VerifyError where the process gave up.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-validation-") as name:
        folder = Path(name)
        program.write(folder)
        command = [sys.executable, "-P", "-c", _START, name, json.dumps(sys.path)]
        with (folder / "stderr.txt").open("wb") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        try:
            yield lambda leaves: _asked(child, folder, [*leaves, *constants])
        finally:
            child.kill()
            child.communicate()


def _asked(child: subprocess.Popen[bytes], folder: Path, leaves: Sequence[Any]) -> list[Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        pickle.dump([packed(leaf) for leaf in leaves], child.stdin)
        child.stdin.flush()
        return [unpacked(leaf) for leaf in pickle.load(child.stdout)]
    except (OSError, EOFError, pickle.UnpicklingError):
        said = (folder / "stderr.txt").read_text(errors="replace").strip()
        raise VerifyError(
            f"the planned step did not run on CPU devices:\n{said[-_TOLD:]}"
        ) from None
