"""The programs of a step's stages, one or many: sharded and lowered, with what each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.dispatch import issue_seconds
from autopar.cost.listing import Seconds
from autopar.cost.stage import StageCost, peak_bytes
from autopar.ir.folded import FoldedProgram
from autopar.ir.graph import Graph
from autopar.ir.program import Program
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.soundness import check_listing
from autopar.ir.spmd import SpmdProgram
from autopar.passes.base import Setting
from autopar.passes.lower.lowering import AbstractLowering, LoweredStages, Mpmd, Spmd
from autopar.passes.lower.program import lower_pipeline
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.stage_costs import cost_stage
from autopar.planner.step_timing import StepTiming, time_folded, time_step


@dataclass(frozen=True)
class StagePrograms:
    """A step as the programs of its stages.

    `priced` are the costs of the stages where they are known already. Where stages are one
    program, `folded` is that, and the devices run it in place of the instructions of `program`.
    """

    placed: PlacedStages
    shardings: tuple[ShardingPlan, ...]  # by submesh
    program: Program
    priced: tuple[StageCost, ...] = ()
    folded: FoldedProgram | None = None

    @property
    def graph(self) -> Graph:
        """The step's graph, of one microbatch where it is cut into some."""
        return self.placed.batching.graph

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Seconds and bytes of each stage."""
        if self.priced:
            return self.priced
        made = self.program.parts
        return tuple(
            cost_stage(
                self.placed, s, self.shardings[stage.submesh],
                [p.listing for p in made if p.part.stage == s],
            )
            for s, stage in enumerate(self.placed.stages.stages)
        )  # fmt: skip

    @property
    def lowered(self) -> Program | FoldedProgram:
        """The list of instructions, or the one program, that the devices run."""
        return self.folded or self.program

    @property
    def lowering(self) -> str:
        """The name of how the stages are lowered; one stage is one program anyway."""
        return Spmd.name if self.folded or self.program.is_one_part else Mpmd.name

    @cached_property
    def timing(self) -> StepTiming:
        """The stages in time."""
        timing = time_step(self.placed, self.costs)
        return time_folded(timing, self.folded) if self.folded is not None else timing

    def lowered_by(self, lowering: AbstractLowering, setting: Setting) -> StagePrograms:
        """The same stages as a pass lowers them. Raises LoweringError where it cannot."""
        if self.program.is_one_part:
            return self
        cluster = self.placed.cluster
        blocks = [c.block.start for c in self.placed.contexts]
        timing = replace(self, folded=None).timing

        def seconds(lowered: Program | FoldedProgram) -> float:
            of = time_folded(timing, lowered) if isinstance(lowered, FoldedProgram) else timing
            return max(of.seconds, issue_seconds(lowered, blocks, cluster))

        given = LoweredStages(
            self.program,
            self.placed.contexts[0].resharder,
            cluster.chip.platform,
            seconds,
            lambda folded: max(replace(self, folded=folded).peak_bytes),
        )
        found = lowering.run(given, setting)
        return replace(self, folded=found if isinstance(found, FoldedProgram) else None)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes that one device of each submesh holds."""
        if self.folded is not None:  # all devices have room for the same
            held = self.folded.state_bytes + self.folded.sum_bytes
            working = max(c.working_bytes for c in self.costs)
            update = max(c.once_bytes for c in self.costs)
            flying = self.folded.ring_bytes + self.folded.lane_bytes
            peak = held + max(flying + working, update)
            return (peak,) * len(self.shardings)
        return tuple(
            peak_bytes([self.costs[s] for s in self.placed.stages_on(k)], flight)
            for k, flight in enumerate(self.placed.in_flight)
        )

    @property
    def argument_bytes(self) -> tuple[int, ...]:
        """Bytes that one device of each submesh holds throughout."""
        return tuple(
            sum(self.costs[s].fixed_bytes for s in self.placed.stages_on(k))
            for k in range(len(self.shardings))
        )

    def seconds(self, submesh: int) -> Seconds:
        """Work and collectives of one submesh in a step."""
        runs = self.placed.stages.microbatches
        own = (self.costs[s] for s in self.placed.stages_on(submesh))
        return sum((c.of_step(runs) for c in own), Seconds())


def lower_stages(
    placed: PlacedStages,
    shardings: Sequence[ShardingPlan],
    setting: Setting,
    known: Mapping[int, SpmdProgram] | None = None,
) -> StagePrograms:
    """The lower slot: lowers every part of stages that were sharded, now or before.

    Parts whose listing is `known`, by number, are only checked. Raises GraphError where the
    program would compute something else than the step.
    """
    program = setting.watched("lower", shardings, lambda: _lower(placed, shardings, known or {}))
    return StagePrograms(placed, tuple(shardings), program)


def _lower(
    placed: PlacedStages, shardings: Sequence[ShardingPlan], known: Mapping[int, SpmdProgram]
) -> Program:
    listings: list[SpmdProgram] = []
    for n, part in enumerate(placed.parts):
        sharding = shardings[part.submesh]
        listings.append(known[n] if n in known else placed.lowered(part, sharding))
        check_listing(part.graph, listings[n], sharding.mesh)
    if placed.stages.is_one_program:
        (submesh,), (listing,) = placed.stages.submeshes, listings
        return Program.of_one_part(placed.batching.graph, listing, submesh)
    return lower_pipeline(placed.dataflow, listings)
