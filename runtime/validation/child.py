"""The process in which a planned step runs: arguments come on stdin, results go to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
from jax import export

from autopar.frontend import compat
from autopar.runtime.aot.program import AotProgram
from autopar.runtime.bind import bind_mesh
from autopar.runtime.validation.remote import answer_calls
from autopar.runtime.validation.steps import open_cpu_devices, packed


def main() -> None:
    """Compile the program of a folder, the word given, for CPU devices; then answer with it."""
    program = AotProgram.read(Path(sys.argv[2]))
    jax.config.update("jax_enable_x64", True)  # the program says how wide each of its values is
    open_cpu_devices(program.mesh.device_count)
    mesh = bind_mesh(program.mesh, program.order, jax.devices("cpu"))
    exported = export.deserialize(bytearray(program.exported))
    shardings = exported.in_shardings_jax(mesh)
    step = jax.jit(exported.call, compiler_options=compat.compiler_options(program.options))

    def run(leaves: list[Any]) -> list[Any]:
        placed = [jax.device_put(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]
        return [packed(leaf) for leaf in step(*placed)]

    answer_calls(run)
