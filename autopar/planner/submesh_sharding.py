"""Shards the stages of each submesh within the memory of its devices."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

from autopar.cost.stage import peak_bytes
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.graph import Graph, Operand
from autopar.ir.paths import meant
from autopar.ir.program import SubmeshGraph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.text import show_bytes
from autopar.ir.values import Value, item_bytes
from autopar.passes.base import Setting
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.optimal import MinMemory
from autopar.passes.shard.recipes import recipe_named
from autopar.passes.shard.solver.effort import QUICK
from autopar.planner.fit_within import Candidate, fit_within
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.request import Pins, Request
from autopar.planner.stage_programs import cost_stage

_ROOMY = 2**60  # bytes that bind nothing
_SMALL = 1500  # ops of a stage up to which the least that it can hold is looked for


class StageMemoryError(MemoryLimitError):
    """The stages of a submesh hold more than its devices may, however they are sharded."""

    def __init__(self, message: str, submesh: int, peak_bytes: int) -> None:
        super().__init__(message)
        self.submesh, self.peak_bytes = submesh, peak_bytes


class SubmeshSharder:
    """Shards the stages of each submesh; isomorphic submeshes take one answer."""

    def __init__(self, placed: PlacedStages, request: Request, setting: Setting) -> None:
        self._placed, self._request, self._setting = placed, request, setting
        self._known: dict[object, tuple[SubmeshGraph, ShardingPlan]] = {}

    def shard(self, submesh: int, partial_sums: bool) -> ShardingPlan:
        """The plan of a submesh; raises StageMemoryError where nothing fits its devices.

        Stages whose option combines gradients once a step are sharded without a limit at first:
        they are known to fit, or nearly.
        """
        joint, context = self._placed.graphs[submesh], self._placed.contexts[submesh]
        pins = self._pins(joint)
        mesh = context.tables.prices.mesh
        key = (structure_hash(joint.graph), mesh, str(context.cluster), pins, partial_sums)
        budget = self._request.budget_bytes
        known = self._known.get(key)
        if known is not None:
            plan = rename_plan(known[1], known[0].graph, joint.graph)
            if self._peak_of(submesh, plan) <= budget:
                return plan
        setting = replace(
            self._setting, cluster=context.cluster, mesh=mesh, pins=pins,
            resharder=context.resharder, in_flight=self._held_often(submesh),
        )  # fmt: skip
        found = self._within(submesh, setting, partial_sums)
        self._known[key] = joint, found
        return found

    def _pins(self, joint: SubmeshGraph) -> Pins:
        """The pins of what the submesh holds."""
        paths = [i.path for i in joint.graph.inputs]
        return tuple(
            (pattern, dims) for pattern, dims in self._request.pins if meant(pattern, paths)
        )

    def _held_often(self, submesh: int) -> dict[str, int]:
        """Values that are held several times over: stashed for several microbatches, or summed in
        more bytes than they have.
        """
        joint, flight = self._placed.graphs[submesh], self._placed.in_flight[submesh]
        values = joint.graph.nested_values
        found = dict.fromkeys(joint.stashed, flight)
        for part in self._placed.parts:
            for a in part.accumulators if part.submesh == submesh else ():
                dtype = values[a.value].dtype
                found[a.value] = max(1, item_bytes(a.dtype or dtype) // item_bytes(dtype))
        return found

    def _within(self, submesh: int, setting: Setting, partial_sums: bool) -> ShardingPlan:
        """The fastest plan that was found to fit; raises StageMemoryError where none was."""
        budget = self._request.budget_bytes
        context = self._placed.contexts[submesh]
        recipe = recipe_named(self._request.method)
        shard = replace(
            self._request.shard, recipe=recipe, effort=QUICK, explain=False,
            reshard_costs=context.tables,
        )  # fmt: skip

        def solve(limit_bytes: int, partial_sums: bool) -> Candidate[ShardingPlan] | None:
            within = replace(setting, memory_bytes=limit_bytes, partial_sums=partial_sums)
            return self._candidate(submesh, shard, within)

        # 1. Without a limit, where the price was of that.
        roomy = solve(_ROOMY, True) if partial_sums else None
        if roomy is not None and roomy.peak_bytes <= budget:
            return roomy.plan
        # 2. Under a limit, moved by what the listing holds beside what the solver counts.
        fit = fit_within(budget, lambda limit: solve(limit, False))
        if fit.best is not None:
            return fit.best.plan
        least = min([fit.fewest_bytes, *([roomy.peak_bytes] if roomy is not None else [])])
        # 3. What holds the least.
        if self._placed.graphs[submesh].graph.op_count <= _SMALL:
            leanest = MinMemory(recipe=recipe, reshard_costs=context.tables)
            found = self._candidate(
                submesh, leanest, replace(setting, memory_bytes=budget, partial_sums=False)
            )
            if found is not None and found.peak_bytes <= budget:
                return found.plan
            least = min([least, *([found.peak_bytes] if found is not None else [])])
        raise self._refusal(submesh, least)

    def _candidate(
        self, submesh: int, shard: AbstractSharding, setting: Setting
    ) -> Candidate[ShardingPlan] | None:
        joint, placed = self._placed.graphs[submesh], self._placed
        try:
            plan = setting.watched("shard", joint, lambda: shard.run(joint.graph, setting))
        except InfeasibleError:
            return None
        costs = [cost_stage(placed, s, plan) for s in placed.stages_on(submesh)]
        seconds = sum(c.of_step(placed.stages.microbatches).total for c in costs)
        peak = peak_bytes(costs, placed.in_flight[submesh])
        return Candidate(plan, peak, seconds, plan.outcome.seconds)

    def _peak_of(self, submesh: int, plan: ShardingPlan) -> int:
        placed = self._placed
        costs = [cost_stage(placed, s, plan) for s in placed.stages_on(submesh)]
        return peak_bytes(costs, placed.in_flight[submesh])

    def _refusal(self, submesh: int, least: float) -> StageMemoryError:
        stages = self._placed.stages
        layers = stages.layers.layers
        held = [s for s in stages.stages if s.submesh == submesh]
        names = ", ".join(f"{layers[s.first].name}..{layers[s.last].name}" for s in held)
        flight, budget = self._placed.in_flight[submesh], self._request.budget_bytes
        needed = int(least) if math.isfinite(least) else budget + budget // 16
        return StageMemoryError(
            f"stage {names} on mesh{submesh} ({stages.submeshes[submesh].mesh}) needs "
            f"{show_bytes(needed)} a device and may hold {show_bytes(budget)}, "
            f"with {flight} microbatches in flight under {stages.schedule}.\n"
            "Try more stages, more microbatches, schedule='1f1b', or more devices.",
            submesh,
            needed,
        )


def structure_hash(graph: Graph) -> str:
    """A hash of what a graph computes, its values known by their order and not by name."""
    return hashlib.sha256(repr(_skeleton(graph)).encode()).hexdigest()


def rename_plan(plan: ShardingPlan, before: Graph, after: Graph) -> ShardingPlan:
    """Renames a plan's values so that it applies to an isomorphic graph."""
    names = dict(zip(before.nested_values, after.nested_values, strict=True))
    return ShardingPlan(
        plan.mesh,
        tuple((names[name], s) for name, s in plan.values),
        plan.assignments,
        tuple((names[name], region, s) for name, region, s in plan.uses),
        plan.shared_partials,
        plan.outcome,
    )


def _skeleton(graph: Graph) -> tuple[object, ...]:
    number = {name: i for i, name in enumerate(graph.values)}

    def known(operand: Operand) -> object:
        return number[operand] if isinstance(operand, str) else str(operand)

    inputs = tuple((_type(i.value), i.role.value) for i in graph.inputs)
    ops = tuple(
        (
            op.kind,
            tuple(map(known, op.operands)),
            tuple(_type(r) for r in op.results),
            op.params,
            op.origin.region,
            op.runs,
            tuple(map(_skeleton, op.graphs)),
        )
        for op in graph.ops
    )
    return inputs, ops, tuple(map(known, graph.outputs)), graph.donated


def _type(value: Value) -> str:
    return value.type_text
