"""The process that compiles: `python -m autopar.runtime.aot.child FOLDER` answers a job in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from autopar.cluster.target import Target
from autopar.runtime.aot.gpu_specs import gpu_spec
from autopar.runtime.aot.job import Job


def main(folder: Path) -> None:
    """Compile the job of a folder; leaves `hlo.txt`, `answer.json` and the compiler's dumps."""
    job = Job.read(folder)
    exported = export.deserialize(bytearray(job.program))
    devices = devices_of(job.target)
    grid = np.array([devices[i] for i in job.order], dtype=object).reshape(job.mesh.sizes)
    mesh = Mesh(grid, job.mesh.names, axis_types=(AxisType.Auto,) * len(job.mesh.names))
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    lowered = jax.jit(exported.call, donate_argnums=job.donated).lower(*shapes)
    compiled = lowered.compile(compiler_options=options_of(job.target, folder))
    (folder / "hlo.txt").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    answer = {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "compiler": f"jaxlib {jaxlib.__version__}",
    }
    (folder / "answer.json").write_text(json.dumps(answer))


def devices_of(target: Target) -> list[Any]:
    """The devices of a target, none of which need exist, in the order that JAX numbers them."""
    if target.platform == "gpu":
        found = topologies.get_topology_desc(
            platform="cuda", topology=target.topology, target_config=gpu_spec(target.chip)
        )
    else:
        found = topologies.get_topology_desc(
            topology_name=target.topology, platform="tpu", num_slices=target.slices
        )
    return list(found.devices)


def options_of(target: Target, folder: Path) -> dict[str, Any]:
    """Compiler options: dump the schedule, which holds the compiler's own timeline."""
    options: dict[str, Any] = {
        "xla_dump_to": str(folder / "dump"),
        "xla_dump_latency_hiding_schedule": True,
    }
    if target.platform == "gpu":
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
    return options


if __name__ == "__main__":
    main(Path(sys.argv[1]))
