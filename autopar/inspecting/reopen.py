"""A plan's programs again, from the step that the plan keeps: no JAX, no user code, no search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cluster.planned import cluster_of
from autopar.cost.prices import Prices
from autopar.errors import PlanError
from autopar.ir.batching import Batching
from autopar.ir.graph import Graph
from autopar.ir.inspection import WHOLE_STEP
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.plan import Plan
from autopar.ir.record import Record
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.soundness import check_listing
from autopar.ir.spmd import SpmdProgram
from autopar.passes.base import Setting
from autopar.passes.layer.fixed import Fixed
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan
from autopar.passes.lower.spmd import lower_spmd
from autopar.passes.pipeline import lower
from autopar.planner.compatibility import contents_of
from autopar.planner.restored_stages import RestoredStages, cuts_of, restore_stages
from autopar.rules import RuleBook, attach_rules


@dataclass(frozen=True)
class Listed:
    """A listing that every device of a submesh runs `runs` times a step.

    In a plan of one program there is one, with `part` "" and `stage` WHOLE_STEP.
    """

    graph: Graph
    sharding: ShardingPlan
    program: SpmdProgram
    prices: Prices
    submesh: int = 0
    stage: int = WHOLE_STEP
    part: str = ""
    runs: int = 1


@dataclass(frozen=True)
class Opened:
    """A plan with the programs that it means; `laid` are its stages, None in one program."""

    plan: Plan
    cluster: Cluster
    batching: Batching
    listings: tuple[Listed, ...]
    laid: RestoredStages | None = None


def reopen(plan: Plan) -> Opened:
    """The programs of a plan, lowered again; raises PlanError where it keeps no step.

    That is a PlanFileError where what it keeps does not fit what it decides.
    """
    if plan.record is None:
        raise PlanError(f"the plan for {plan.origin.step} keeps no step to look into: plan again")
    cluster = cluster_of(plan)
    with contents_of(plan):
        plan.check()
        return _opened(plan, cluster, _ruled(plan.record))


def _opened(plan: Plan, cluster: Cluster, batching: Batching) -> Opened:
    if plan.pipeline is None:
        plan.sharding.verify(batching.graph)
        prices = Prices(cluster, plan.mesh)
        program = lower(batching.graph, plan.sharding, Setting(cluster, plan.mesh, 0))
        listed = Listed(batching.graph, plan.sharding, program, prices)
        return Opened(plan, cluster, batching, (listed,))
    laid = _laid(plan, plan.pipeline, batching, cluster)
    return Opened(plan, cluster, batching, tuple(_parts(laid, plan.pipeline)), laid)


def _ruled(record: Record) -> Batching:
    """The step that a plan keeps, every op with its rule."""
    batching, rules = record.batching, RuleBook(dict(record.rules))
    hoist = batching.hoist
    return replace(
        batching,
        graph=attach_rules(batching.graph, rules),
        hoist=replace(hoist, graph=attach_rules(hoist.graph, rules)) if hoist else None,
    )


def _laid(
    plan: Plan, pipeline: PipelinePlan, batching: Batching, cluster: Cluster
) -> RestoredStages:
    setting = Setting(cluster, plan.mesh, plan.origin.memory_bytes)
    layers = Fixed(cuts_of(pipeline)).run(batching, setting)
    return restore_stages(pipeline, batching, layers, cluster)


def _parts(laid: RestoredStages, plan: PipelinePlan) -> Iterator[Listed]:
    joints = laid.joints()
    for joint, sharding in zip(joints, plan.shardings, strict=True):
        sharding.verify(joint.graph)
    for part in laid.parts:
        joint, tables = joints[part.submesh], laid.grounds[part.submesh].tables
        sharding = part_plan(part, joint, plan.shardings[part.submesh])
        loose = left_partial(part, joint)
        program = lower_spmd(part.graph, sharding, tables.resharder, loose)
        check_listing(part.graph, program, sharding.mesh)
        runs = plan.microbatches if part.is_looped else 1
        yield Listed(
            part.graph, sharding, program, tables.prices, part.submesh, part.stage, part.name, runs
        )
