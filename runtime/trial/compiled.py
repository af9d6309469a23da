"""Programs compiled for virtual CPU devices of this process, read like those of other targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from autopar.hlo.collectives import compiled_collectives
from autopar.ir.compiled import Compiled
from autopar.ir.mesh import MeshShape
from autopar.runtime.bind import bind_mesh
from autopar.runtime.parts import PartSource
from autopar.runtime.trial.steps import cpu_devices


@dataclass(frozen=True)
class CpuProgram:
    """A program of one mesh that is yet to be compiled for CPU devices."""

    mesh: MeshShape
    compile: Callable[[], Any]

    def compiled(self) -> Compiled:
        """What XLA made of it; its peak leaves temporaries out, so these are added."""
        made = self.compile()
        memory = made.memory_analysis()
        order = range(self.mesh.device_count)
        return Compiled(
            target=f"{self.mesh.device_count} virtual CPU devices",
            compiler=f"jaxlib {version('jaxlib')}",
            argument_bytes=memory.argument_size_in_bytes,
            peak_bytes=memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes,
            collectives=compiled_collectives(made.as_text(), self.mesh, order),
        )


def cpu_program_of_part(source: PartSource) -> CpuProgram:
    """A part of a planned step; raises VerifyError where this process has too few CPU devices."""
    mesh = source.mesh
    devices = cpu_devices(mesh.device_count)
    bound = bind_mesh(mesh, range(mesh.device_count), devices)
    return CpuProgram(mesh, lambda: source.lower(bound).compile(device_assignment=tuple(devices)))
