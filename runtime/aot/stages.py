"""The programs of a pipeline's stages as jobs: each different one once, on its own submesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster, device_order
from autopar.cluster.target import target_within
from autopar.ir.stages import Submesh
from autopar.runtime.aot.job import Job, abstract_mesh, job_of_jitted
from autopar.runtime.likeness import part_key
from autopar.runtime.parts import PartSource


@dataclass(frozen=True)
class StageJob:
    """The job of a part; all `sources` are that same program, the first of them the one taken."""

    sources: tuple[PartSource, ...]
    job: Job

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that are this program: F0, F1, ..."""
        return tuple(s.name for s in self.sources)


def jobs_of_stages(
    sources: Sequence[PartSource], submeshes: Sequence[Submesh], cluster: Cluster
) -> tuple[StageJob, ...]:
    """A job for each different part, in the order of the parts.

    A part is compiled for the block of the cluster that its submesh is, as a cluster by itself.
    Raises what `job_of_jitted` raises.
    """
    alike: dict[Hashable, list[PartSource]] = {}
    for source in sources:
        alike.setdefault(part_key(source), []).append(source)
    return tuple(
        StageJob(tuple(same), _job(same[0], submeshes[same[0].program.part.submesh], cluster))
        for same in alike.values()
    )


def _job(source: PartSource, submesh: Submesh, cluster: Cluster) -> Job:
    devices = submesh.devices or device_order(cluster, submesh.mesh)
    target, order = target_within(cluster, devices)
    mesh = abstract_mesh(source.mesh)
    given = tuple(t.on(mesh) for t in source.given)
    return job_of_jitted(source.jitted(mesh), given, source.mesh, order, source.donated, target)
