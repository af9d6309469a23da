"""The process in which a planned step runs: arguments come on stdin, results go to stdout."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import jax
from jax import export

from autopar.runtime.aot.program import AotProgram
from autopar.runtime.bind import bind_mesh
from autopar.runtime.validation.steps import open_cpu_devices, packed, unpacked


def main(folder: str) -> None:
    """Compile the program of a folder for CPU devices, then answer until nobody asks."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a step may print
    program = AotProgram.read(Path(folder))
    jax.config.update("jax_enable_x64", True)  # the program says how wide each of its values is
    open_cpu_devices(program.mesh.device_count)
    mesh = bind_mesh(program.mesh, program.order, jax.devices("cpu"))
    exported = export.deserialize(bytearray(program.exported))
    shardings = exported.in_shardings_jax(mesh)
    step = jax.jit(exported.call)
    while True:
        try:
            leaves = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        placed = [
            jax.device_put(unpacked(leaf), s) for leaf, s in zip(leaves, shardings, strict=True)
        ]
        pickle.dump([packed(leaf) for leaf in step(*placed)], answers)
        answers.flush()
