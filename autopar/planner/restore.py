"""Restores a saved plan: its step is lowered again, and nothing is searched or solved."""

from __future__ import annotations

from autopar.cluster.planned import planned_cluster
from autopar.ir.plan import Plan, leaf_arguments
from autopar.ir.plan_file import contents_of
from autopar.passes.base import Setting
from autopar.passes.lower.lowering import lowering_named
from autopar.planner.compatibility import check_ends
from autopar.planner.memory_fit import MeshContext
from autopar.planner.placed_stages import place_plan
from autopar.planner.planned import Planned, list_arguments, list_outputs
from autopar.planner.request import Request
from autopar.planner.sliced_step import Source, slice_as_planned
from autopar.planner.stage_programs import lower_stages


def restore(plan: Plan, source: Source, request: Request | None = None) -> Planned:
    """The programs of a plan that was made before, for this request where it is known.

    Raises PlanMismatchError, naming what differs, where the plan is for another step or JAX, and
    PlanFileError where it does not compute the step.
    """
    # 1. Does the plan hold together?
    with contents_of(plan):
        plan.check()
    # 2. The step, cut and recomputed as the plan has it, if the plan is for this step.
    cluster = planned_cluster(plan)
    setting = Setting(cluster, plan.mesh, plan.origin.memory_bytes)
    source = source.with_state({leaf.path for leaf in leaf_arguments(plan.state)})
    sliced = slice_as_planned(source, plan, setting)
    # 3. Its stages on their submeshes, lowered; they must begin and end as the plan says.
    with contents_of(plan):
        placed = place_plan(plan, sliced.batching, sliced.layers, cluster)
        programs = lower_stages(placed, [s.sharding for s in plan.submeshes], setting)
        programs = programs.lowered_by(lowering_named(plan.lowering), setting)
        trace = sliced.trace
        arguments = tuple(list_arguments(trace, programs))
        check_ends(plan, arguments, tuple(list_outputs(trace, programs)))
    request = request or Request.of_plan(plan, cluster, source.rules)
    context = MeshContext(request, placed.contexts[0]) if plan.is_one_program else None
    return Planned(source, request, trace, plan, programs, context)
