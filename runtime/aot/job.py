"""The folder in which a program goes to a compiler in another process and its answer comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from autopar.cluster.target import Target
from autopar.frontend import TracedStep
from autopar.ir.mesh import MeshShape
from autopar.ir.spmd import SpmdProgram
from autopar.runtime.bind import partition_spec
from autopar.runtime.emit import local_function

_PLATFORMS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


@dataclass(frozen=True)
class Job:
    """A program, as JAX exports it, with the mesh it is for and what it is compiled to.

    Position i of the mesh (row-major) is device `order[i]` of the target; `donated` are flat
    arguments whose buffers the outputs may take.
    """

    program: bytes
    mesh: MeshShape
    order: tuple[int, ...]
    donated: tuple[int, ...]
    target: Target

    def write(self, folder: Path) -> None:
        """The program and all that is known of it."""
        (folder / "program.bin").write_bytes(self.program)
        known = {
            "names": self.mesh.names,
            "sizes": self.mesh.sizes,
            "order": self.order,
            "donated": self.donated,
            "target": asdict(self.target),
        }
        (folder / "job.json").write_text(json.dumps(known))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The job that was written to a folder."""
        known = json.loads((folder / "job.json").read_text())
        return cls(
            (folder / "program.bin").read_bytes(),
            MeshShape(tuple(known["names"]), tuple(known["sizes"])),
            tuple(known["order"]),
            tuple(known["donated"]),
            Target(**known["target"]),
        )


def abstract_mesh(mesh: MeshShape) -> AbstractMesh:
    """A mesh of no devices in particular."""
    return AbstractMesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def job_of_jitted(
    jitted: Any,
    args: tuple[Any, ...],
    mesh: MeshShape,
    order: tuple[int, ...],
    donated: tuple[int, ...],
    target: Target,
) -> Job:
    """The job of any jitted function whose shardings are over `abstract_mesh(mesh)`.

    `args` are shapes, with shardings where the function has none of its own; `donated` counts
    flat arguments.
    """
    lowered = export.export(jitted, platforms=[_PLATFORMS[target.platform]])(*args)
    return Job(bytes(lowered.serialize()), mesh, order, donated, target)


def job_of_step(
    traced: TracedStep,
    program: SpmdProgram,
    mesh: MeshShape,
    order: tuple[int, ...],
    target: Target,
    donate: bool = True,
) -> Job:
    """The job of a planned step: the very program that an Executor would run."""
    import jax

    abstract = abstract_mesh(mesh)
    given = tuple(NamedSharding(abstract, partition_spec(s)) for s in program.input_shardings)
    made = tuple(NamedSharding(abstract, partition_spec(s)) for s in program.output_shardings)
    platform = _PLATFORMS[target.platform]
    mapped = jax.shard_map(
        local_function(traced.program, program, mesh, platform),
        mesh=abstract,
        in_specs=tuple(s.spec for s in given),
        out_specs=tuple(s.spec for s in made),
        check_vma=False,
    )
    mapped.__name__ = traced.name
    shapes = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(traced.program.input_avals, given, strict=True)
    )
    jitted = jax.jit(mapped, in_shardings=given, out_shardings=made)
    donated = traced.state_inputs if donate else ()
    return job_of_jitted(jitted, shapes, mesh, order, tuple(donated), target)
