"""A plan's programs again, from the step that the plan keeps: no JAX, no user code, no search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.cluster.planned import planned_cluster
from autopar.cost.prices import Prices
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import Timed, timed_listing
from autopar.errors import PlanError
from autopar.ir.batching import Accumulator, Batching
from autopar.ir.graph import Graph
from autopar.ir.inspection import WHOLE_STEP
from autopar.ir.listing import Listing
from autopar.ir.plan import Plan
from autopar.ir.plan_file import contents_of
from autopar.ir.program import Part, PartKind
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import Setting, Single
from autopar.passes.layer.fixed import Fixed
from autopar.passes.lower.lowering import lowering_named
from autopar.planner.placed_stages import PlacedStages, place_plan
from autopar.planner.stage_programs import StagePrograms, lower_stages
from autopar.rules import RuleBook, attach_rules


@dataclass(frozen=True)
class Listed:
    """The listing of a part, which every device of its submesh runs `runs` times a step.

    A step that is one program is one part, with the name "" and the stage WHOLE_STEP. Others come
    with the `sums` that they add to.
    """

    graph: Graph
    sharding: ShardingPlan
    listing: Listing
    prices: Prices
    submesh: int = 0
    stage: int = WHOLE_STEP
    part: str = ""
    runs: int = 1
    sums: tuple[Accumulator, ...] | None = None

    @cached_property
    def timed(self) -> Timed:
        """A single run of the listing, kernel by kernel."""
        return timed_listing(self.graph, self.listing, self.prices, self.sizes, self.sums)

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of pieces, and what is stored of them."""
        return Sizes(self.graph, self.prices.mesh, self.prices.platform)


@dataclass(frozen=True)
class LoadedPlan:
    """A plan with the programs that it means, and its stages on their submeshes."""

    plan: Plan
    cluster: Cluster
    batching: Batching
    listings: tuple[Listed, ...]
    placed: PlacedStages

    @cached_property
    def programs(self) -> StagePrograms:
        """The programs of the stages, one of all where the plan has them so."""
        plan = self.plan
        setting = Setting(self.cluster, plan.mesh, plan.origin.memory_bytes)
        known = {n: listed.listing for n, listed in enumerate(self.listings)}
        found = lower_stages(self.placed, [s.sharding for s in plan.submeshes], setting, known)
        return found.lowered_by(lowering_named(plan.lowering), setting)

    def with_sharding(self, submesh: int, sharding: ShardingPlan) -> LoadedPlan:
        """The same stages with another sharding of a submesh; what else a step takes is kept."""
        plan = self.plan.with_sharding(submesh, sharding)
        return replace(self, plan=plan, listings=_list_parts(self.placed, plan))


def reopen(plan: Plan) -> LoadedPlan:
    """The programs of a plan, lowered again; raises PlanError where it keeps no step.

    That is a PlanFileError where what it keeps does not fit what it decides.
    """
    if plan.record is None:
        raise PlanError(f"the plan for {plan.origin.step} keeps no step to look into: plan again")
    cluster = planned_cluster(plan)
    with contents_of(plan):
        plan.check()
        # The step that the plan keeps, every op with its rule.
        batching, rules = plan.record.batching, RuleBook(dict(plan.record.rules))
        hoist = batching.hoist
        batching = replace(
            batching,
            graph=attach_rules(batching.graph, rules),
            hoist=replace(hoist, graph=attach_rules(hoist.graph, rules)) if hoist else None,
        )
        setting = Setting(cluster, plan.mesh, plan.origin.memory_bytes)
        cuts = tuple(stage.stop for stage in plan.stages[:-1])
        layering = Single() if plan.is_one_program else Fixed(cuts)
        placed = place_plan(plan, batching, layering.run(batching, setting), cluster)
        return LoadedPlan(plan, cluster, batching, _list_parts(placed, plan), placed)


def _list_parts(placed: PlacedStages, plan: Plan) -> tuple[Listed, ...]:
    shardings = [submesh.sharding for submesh in plan.submeshes]
    return tuple(list_part(placed, part, shardings[part.submesh]) for part in placed.parts)


def list_part(placed: PlacedStages, part: Part, whole: ShardingPlan) -> Listed:
    """The listing of a part where its submesh is sharded so."""
    is_whole = part.kind is PartKind.WHOLE
    return Listed(
        part.graph,
        placed.part_sharding(part, whole),
        placed.listing(part, whole),
        placed.contexts[part.submesh].tables.prices,
        part.submesh,
        WHOLE_STEP if is_whole else part.stage,
        "" if is_whole else part.name,
        placed.runs(part),
        None if is_whole else part.accumulators,
    )
