"""Compiles programs ahead of time and keeps what came of each, so that none is compiled twice."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path

from jax import export

from autopar.ir.compiled import CheckLevel, Compiled
from autopar.runtime.aot.child import options_of
from autopar.runtime.aot.launch import compile_in, read_answer
from autopar.runtime.aot.program import AotProgram

# Where an op came from, in a program's text.
_LINES = re.compile(r"^#loc.*\n| loc\([^()\n]*(?:\([^()\n]*\))?\)", re.MULTILINE)


def compiled_once(program: AotProgram, cache: Path) -> tuple[str, Compiled]:
    """The name of a program and the compiler's figures, from `cache` where it has them.

    What the compiler wrote is kept, and read by the readers as they are now.
    """
    key = program_key(program)
    folder = cache / key
    if not (folder / "answer.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=cache) as name:
            compile_in(Path(name), program, CheckLevel.FULL)
            _keep_schedules(Path(name))
            shutil.copytree(name, folder, dirs_exist_ok=True)
    return key, read_answer(program, folder)


def program_key(program: AotProgram) -> str:
    """A name for a program without its source lines, its devices and the compiler's options."""
    text = export.deserialize(bytearray(program.exported)).mlir_module()
    digest = hashlib.sha256(_LINES.sub("", text).encode())
    options = options_of(program.target, program.options, Path("/"))
    digest.update(
        repr((program.mesh, program.order, program.donated, program.target, options)).encode()
    )
    return digest.hexdigest()[:16]


def _keep_schedules(folder: Path) -> None:
    """Drop the bulk of the dumps."""
    for path in [*folder.glob("dump/*"), *folder.glob("*/dump/*")]:
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.endswith(".schedule.txt"):
            path.unlink()
