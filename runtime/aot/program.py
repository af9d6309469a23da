"""The folder in which a program goes to a compiler in another process and its answer comes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax import export

from autopar.cluster import Cluster, device_order
from autopar.cluster.target import Target, target_within
from autopar.errors import VerifyError
from autopar.ir.codec import Codec, Item, format_json, parse_json
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Submesh
from autopar.runtime.aot.extras import check_extras
from autopar.runtime.aot.gpu_specs import gpu_spec
from autopar.runtime.folded import FoldedSource
from autopar.runtime.parts import PartSource
from autopar.runtime.parts import abstract_mesh as abstract_mesh

# What of a program is written beside it.
_KNOWN: dict[str, Any] = {
    "mesh": MeshShape, "order": tuple[int, ...], "donated": tuple[int, ...], "target": Target
}  # fmt: skip
_EXPORTED = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


@dataclass(frozen=True)
class AotProgram:
    """A program, as JAX exports it, with the mesh it is for and what it is compiled to.

    Position i of the mesh (row-major) is device `order[i]` of the target, by our numbers;
    `donated` are flat arguments whose buffers the outputs may take.
    """

    exported: bytes
    mesh: MeshShape
    order: tuple[int, ...]
    donated: tuple[int, ...]
    target: Target

    def write(self, folder: Path) -> None:
        """The program and all that is known of it."""
        (folder / "program.bin").write_bytes(self.exported)
        known = {n: Codec().write(hint, getattr(self, n)) for n, hint in _KNOWN.items()}
        (folder / "program.json").write_text(format_json(known))

    @classmethod
    def read(cls, folder: Path) -> AotProgram:
        """The program that was written to a folder."""
        known = Item(parse_json((folder / "program.json").read_text())).fields()
        given = {n: Codec().read(hint, known[n]) for n, hint in _KNOWN.items()}
        return cls((folder / "program.bin").read_bytes(), **given)


def export_jitted(
    jitted: Any,
    args: tuple[Any, ...],
    mesh: MeshShape,
    order: tuple[int, ...],
    donated: tuple[int, ...],
    target: Target,
) -> AotProgram:
    """The export of any jitted function whose shardings are over `abstract_mesh(mesh)`.

    `args` are shapes, with shardings where the function has none of its own; `donated` counts
    flat arguments. Raises VerifyError where the target's compiler is not installed or JAX cannot
    export the function, ClusterError where the compiler does not know the chip.
    """
    if target.platform != "cpu":
        check_extras(target.platform)
    if target.platform == "gpu":
        gpu_spec(target.chip)
    try:
        exported = export.export(jitted, platforms=[_EXPORTED[target.platform]])(*args)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise VerifyError(
            f"JAX cannot hand the program to the compiler of {target}: {error}. What calls back to "
            "this host (jax.debug.print, callbacks) or asks its libraries (cuDNN attention) must "
            "be left out to compile for hardware that is not here."
        ) from error
    return AotProgram(bytes(exported.serialize()), mesh, order, donated, target)


def export_part(source: PartSource, submeshes: Sequence[Submesh], cluster: Cluster) -> AotProgram:
    """The export of a part: the very program that an executor would run.

    It is for the block of the cluster that the part's submesh is, as one by itself. Raises what
    `export_jitted` raises.
    """
    submesh = submeshes[source.program.part.submesh]
    devices = submesh.devices or device_order(cluster, submesh.mesh)
    target, order = target_within(cluster, devices)
    mesh = abstract_mesh(source.mesh)
    given = tuple(t.on(mesh) for t in source.given)
    return export_jitted(source.jitted(mesh), given, source.mesh, order, source.donated, target)


def export_folded(
    source: FoldedSource,
    kept: Collection[tuple[int, int]],
    submeshes: Sequence[Submesh],
    cluster: Cluster,
) -> AotProgram:
    """The export of all stages as one program, for their blocks of the cluster.

    Raises what `export_jitted` raises.
    """
    target, order = target_within(cluster, [d for s in submeshes for d in s.devices])
    mesh, donated = abstract_mesh(source.mesh), source.donated(kept)
    given = tuple(source.given(mesh))
    return export_jitted(source.jitted(mesh, donated), given, source.mesh, order, donated, target)
