"""The process that compiles: `python -m autopar.runtime.aot.child FOLDER` answers what is in it."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh

from autopar.cluster.target import Target
from autopar.frontend import compat
from autopar.ir.compiler_options import CompilerOptions
from autopar.runtime.aot.devices import devices_of as devices_of
from autopar.runtime.aot.program import AotProgram, write_answer, write_overflow
from autopar.runtime.aot.ticks import add_ticks


def main(folder: Path) -> None:
    """Compile the program of a folder; leaves `hlo.txt`, `answer.json` and the compiler's dumps."""
    program = AotProgram.read(folder)
    exported = export.deserialize(bytearray(program.exported))
    given = _arguments(exported, program)
    lowered = jax.jit(_named(exported), donate_argnums=program.donated).lower(*given)
    options = options_of(program.target, program.options, folder)
    if program.ticks:
        add_ticks(lowered.compiler_ir("stablehlo"), program.mesh)
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        pieces = (math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in given)
        write_overflow(folder, str(error), sum(pieces))
        return
    (folder / "hlo.txt").write_text(compiled.as_text() or "")
    write_answer(folder)


def _arguments(exported: export.Exported, program: AotProgram) -> list[Any]:
    """Shapes of the arguments, as they lie on the target's devices."""
    devices = devices_of(program.target)
    grid = np.array([devices[i] for i in program.order], dtype=object).reshape(program.mesh.sizes)
    mesh = Mesh(grid, program.mesh.names, axis_types=(AxisType.Auto,) * len(program.mesh.names))
    lying = zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in lying]


def _named(exported: export.Exported) -> Callable[..., Any]:
    """The program under its own name, which dumps show."""

    def run(*given: Any) -> Any:
        return exported.call(*given)

    run.__name__ = exported.fun_name
    return run


def options_of(target: Target, own: CompilerOptions, folder: Path) -> dict[str, Any]:
    """A program's own options, and what compiling it without a device takes.

    That is a dump of the schedule, which holds the compiler's own timeline.
    """
    options: dict[str, Any] = {
        **compat.compiler_options(own),
        "xla_dump_to": str(folder / "dump"),
        "xla_dump_latency_hiding_schedule": True,
    }
    if target.platform == "gpu":
        # Without a device nothing is tuned: Triton would get tiles that its times are wrong for.
        options["xla_gpu_enable_triton_gemm"] = False
    return options


def leave_with_parent(folder: Path) -> None:
    """End this process, and its folder with it, when the one that started it is gone."""

    def wait() -> None:
        os.read(0, 1)  # the other end is closed when that process ends, however it does
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    leave_with_parent(Path(sys.argv[1]))
    main(Path(sys.argv[1]))
