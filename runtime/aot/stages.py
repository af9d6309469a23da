"""The programs of a pipeline's stages as jobs: each different one once, on its own submesh."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from autopar.cluster import Cluster, device_order
from autopar.cluster.target import target_within
from autopar.ir.stages import Submesh
from autopar.runtime.aot.job import Job, abstract_mesh, job_of_jitted
from autopar.runtime.likeness import part_key
from autopar.runtime.parts import PartSource


def alike_parts(sources: Iterable[PartSource]) -> tuple[tuple[PartSource, ...], ...]:
    """Parts that are one program together, in the order of the first of each."""
    alike: dict[Hashable, list[PartSource]] = {}
    for source in sources:
        alike.setdefault(part_key(source), []).append(source)
    return tuple(map(tuple, alike.values()))


def job_of_part(source: PartSource, submeshes: Sequence[Submesh], cluster: Cluster) -> Job:
    """The job of a part, for the block of the cluster that its submesh is, as one by itself.

    Raises what `job_of_jitted` raises.
    """
    submesh = submeshes[source.program.part.submesh]
    devices = submesh.devices or device_order(cluster, submesh.mesh)
    target, order = target_within(cluster, devices)
    mesh = abstract_mesh(source.mesh)
    given = tuple(t.on(mesh) for t in source.given)
    return job_of_jitted(source.jitted(mesh), given, source.mesh, order, source.donated, target)
