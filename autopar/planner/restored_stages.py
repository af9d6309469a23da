"""The stages of a plan that was made before, on their submeshes: all that takes no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cluster.submesh import Block, submeshes
from autopar.ir.batching import Batching
from autopar.ir.layers import LayerSequence
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Part, SubmeshGraph
from autopar.ir.stages import Stage, StagePlan
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.split import split
from autopar.passes.lower.partition.submesh_graph import submesh_graph
from autopar.planner.submesh_sharding import SubmeshContext, submesh_context


@dataclass(frozen=True)
class RestoredStages:
    """Stages and their parts, and for each submesh its devices and the prices there."""

    batching: Batching
    stages: StagePlan
    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    grounds: tuple[SubmeshContext, ...]

    def joints(self) -> tuple[SubmeshGraph, ...]:
        """What each submesh runs, as the one graph that its sharding decides."""
        links = PartDataflow.of(self.batching, self.stages, self.parts)
        return tuple(submesh_graph(links, k) for k in range(len(self.stages.submeshes)))


def restore_stages(
    plan: PipelinePlan, batching: Batching, layers: LayerSequence, cluster: Cluster
) -> RestoredStages:
    """A plan's stages over the layers that its cuts make of a step."""
    stages = StagePlan(
        layers,
        tuple(Stage(i, i, s.submesh, s.recompute, s.cuts) for i, s in enumerate(plan.stages)),
        plan.submeshes,
        plan.microbatches,
        plan.schedule,
    )
    stages.verify()
    blocks = tuple(_block(cluster, s.devices) for s in plan.submeshes)
    grounds = (
        submesh_context(cluster, b, s) for b, s in zip(blocks, stages.submeshes, strict=True)
    )
    return RestoredStages(batching, stages, split(batching, stages), blocks, tuple(grounds))


def cuts_of(plan: PipelinePlan) -> tuple[int, ...]:
    """The ops of the microbatch's graph that the stages after the first begin with."""
    return tuple(s.stop for s in plan.stages[:-1])


def _block(cluster: Cluster, devices: Sequence[int]) -> Block:
    """The block of a cluster that some devices are."""
    shape = next(s for s in submeshes(cluster) if s.device_count == len(devices))
    return Block(min(devices), shape)
