"""Stages that were chosen become programs: each submesh sharded within its memory, then lowered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster, device_order
from autopar.cluster.submesh import Block, cut_out
from autopar.ir.layers import Layer, LayerSequence
from autopar.ir.program import Part, Program
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Stage, StagePlan, Submesh
from autopar.passes.base import Setting
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.split import split
from autopar.passes.lower.partition.submesh_graph import submesh_graph
from autopar.passes.lower.program import lower_pipeline
from autopar.passes.stage.prices import Choice, ChosenStage
from autopar.planner.request import Request
from autopar.planner.sliced_step import SlicedStep
from autopar.planner.stage_costs import StageCosts
from autopar.planner.submesh_sharding import (
    Sharder,
    SubmeshContext,
    costs_of,
    peak_bytes,
    peak_in_flight,
    submesh_context,
)


@dataclass(frozen=True)
class StagePrograms:
    """A step as stage programs: what was decided for each submesh, and what each stage takes."""

    sliced: SlicedStep
    stages: StagePlan
    parts: tuple[Part, ...]
    plans: tuple[ShardingPlan, ...]
    costs: tuple[StageCosts, ...]  # by stage
    peak_bytes: tuple[int, ...]  # by submesh
    program: Program

    @property
    def argument_bytes(self) -> tuple[int, ...]:
        """Bytes that each submesh holds throughout, on one device."""
        held = [0] * len(self.plans)
        for stage, costs in zip(self.stages.stages, self.costs, strict=True):
            held[stage.submesh] += costs.fixed_bytes
        return tuple(held)


def stage_plan(
    joined: LayerSequence, layers: Sequence[Layer], choice: Choice, cluster: Cluster
) -> StagePlan:
    """What was chosen of some layers, each stage one of those that are `joined` of them.

    A submesh's devices stand in the order of its logical mesh.
    """
    blocks = list(dict.fromkeys(s.block for s in choice.stages))
    meshes = {s.block: s.mesh for s in choice.stages}
    return StagePlan(
        joined,
        tuple(
            Stage(i, i, blocks.index(s.block), s.recompute, _cuts(layers, s))
            for i, s in enumerate(choice.stages)
        ),
        tuple(Submesh(meshes[b], _devices(cluster, b, Submesh(meshes[b]))) for b in blocks),
        choice.microbatches,
        choice.schedule,
    )


def _cuts(layers: Sequence[Layer], stage: ChosenStage) -> tuple[int, ...]:
    """Where the layers of a stage that is recomputed meet."""
    return tuple(layers[i].last + 1 for i in range(stage.first, stage.last) if stage.recompute)


def _devices(cluster: Cluster, block: Block, submesh: Submesh) -> tuple[int, ...]:
    order = device_order(cut_out(cluster, block.submesh), submesh.mesh)
    return tuple(block.start + i for i in order)


def build_stages(
    sliced: SlicedStep, stages: StagePlan, choice: Choice, request: Request, setting: Setting
) -> StagePrograms:
    """Every submesh sharded within the memory of its devices, and all of them lowered.

    Raises MemoryLimitError where a submesh's stages do not fit.
    """
    parts = split(sliced.batching, stages)
    ways = {s.block: (s.recipe, s.partial_sums) for s in choice.stages}
    grounds = [
        submesh_context(request.cluster, b, s) for b, s in zip(ways, stages.submeshes, strict=True)
    ]
    builder = Sharder(sliced, stages, parts, request, setting)
    made = [
        builder.sharded(k, ground, *way)
        for k, (ground, way) in enumerate(zip(grounds, ways.values(), strict=True))
    ]
    return staged(sliced, stages, parts, made, grounds)


def staged(
    sliced: SlicedStep,
    stages: StagePlan,
    parts: tuple[Part, ...],
    plans: Sequence[ShardingPlan],
    grounds: Sequence[SubmeshContext],
) -> StagePrograms:
    """Stage programs of plans that were made, now or before."""
    batching = sliced.batching
    links = PartDataflow.of(batching, stages, parts)
    joints = [submesh_graph(links, k) for k in range(len(stages.submeshes))]
    program = lower_pipeline(
        batching, stages, parts, tuple(plans), tuple(g.resharder for g in grounds)
    )
    costs = tuple(
        costs_of(s, parts, joints[stage.submesh], plans[stage.submesh],
                  grounds[stage.submesh].tables, stages.microbatches)
        for s, stage in enumerate(stages.stages)
    )  # fmt: skip
    flights = peak_in_flight(stages)
    peaks = tuple(
        peak_bytes(
            [c for c, s in zip(costs, stages.stages, strict=True) if s.submesh == k], flights[k]
        )
        for k in range(len(stages.submeshes))
    )
    return StagePrograms(sliced, stages, parts, tuple(plans), costs, peaks, program)
