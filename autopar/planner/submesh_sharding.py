"""Shards the stages of each submesh within the memory of its devices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cluster.submesh import Block, cut_out
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.graph import Graph, Operand
from autopar.ir.paths import meant
from autopar.ir.program import Part, SubmeshGraph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import StagePlan, Submesh
from autopar.ir.text import show_bytes
from autopar.ir.values import Value
from autopar.passes.base import Setting
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.submesh_graph import submesh_graph
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.passes.shard.optimal import MinMemory, Optimal
from autopar.passes.shard.recipes import AbstractRecipe, recipe_named
from autopar.passes.shard.solver.effort import QUICK
from autopar.planner.request import Pins, Request
from autopar.planner.sliced_step import SlicedStep
from autopar.planner.stage_costs import StageCosts, stage_costs
from autopar.schedule.table import in_flight

_ROOMY = 2**60  # bytes that bind nothing
_SMALL = 1500  # ops of a stage up to which other shardings are tried where one does not fit
_LEAN = ("megatron", "fsdp", "fsdp+tp")  # recipes that cut up parameters and optimizer state


@dataclass(frozen=True)
class SubmeshContext:
    """A submesh as its stages find it: the cluster that it is by itself, and the prices there."""

    cluster: Cluster
    tables: ReshardCosts

    @property
    def resharder(self) -> Resharder:
        """Routes from one sharding to another."""
        return self.tables.resharder


def submesh_context(cluster: Cluster, block: Block, submesh: Submesh) -> SubmeshContext:
    """A submesh's part of the cluster, where nothing is priced yet."""
    part = cut_out(cluster, block.submesh)
    return SubmeshContext(part, ReshardCosts(Prices(part, submesh.mesh)))


def costs_of(
    stage: int, parts: Sequence[Part], joint: SubmeshGraph, plan: ShardingPlan,
    tables: ReshardCosts, microbatches: int,
) -> StageCosts:  # fmt: skip
    """What one stage takes on its submesh."""
    own = [p for p in parts if p.stage == stage]
    return stage_costs(own, own, joint, plan, tables, microbatches)


def peak_in_flight(stages: StagePlan) -> tuple[int, ...]:
    """Of how many microbatches each submesh keeps a stage's activations at most."""
    count, chunks = len(stages.submeshes), stages.chunks
    flying = in_flight(stages.schedule, count, stages.microbatches, chunks)
    return tuple(-(-n // chunks) for n in flying)


def peak_bytes(costs: Sequence[StageCosts], flight: int) -> int:
    """The most that a device holds for its stages, so many microbatches in flight."""
    held = sum(c.fixed_bytes + flight * c.activation_bytes for c in costs)
    return held + max((c.working_bytes for c in costs), default=0)


class Sharder:
    """Shards submeshes; those whose stages are alike take one answer."""

    def __init__(
        self,
        sliced: SlicedStep,
        stages: StagePlan,
        parts: tuple[Part, ...],
        request: Request,
        setting: Setting,
    ) -> None:
        self._sliced, self._stages, self._parts = sliced, stages, parts
        self._request, self._setting = request, setting
        self._flights = peak_in_flight(stages)
        self._links = PartDataflow.of(sliced.batching, stages, parts)
        self._known: dict[object, tuple[SubmeshGraph, ShardingPlan]] = {}

    def sharded(
        self, submesh: int, ground: SubmeshContext, recipe: str, partial_sums: bool
    ) -> ShardingPlan:
        """The plan of a submesh; raises MemoryLimitError where nothing fits its devices.

        First the recipe that the stage's price is of, without a limit: it is known to fit, or
        nearly.
        """
        joint = submesh_graph(self._links, submesh)
        pins = self._pins(joint)
        mesh = ground.tables.prices.mesh
        key = (structure_hash(joint.graph), mesh, str(ground.cluster), pins, recipe, partial_sums)
        known = self._known.get(key)
        plan: ShardingPlan | None
        peak = _ROOMY
        if known is not None:
            plan = rename_plan(known[1], known[0].graph, joint.graph)
        else:
            shard = Optimal(recipe_named(recipe), QUICK, explain=False, reshard_costs=ground.tables)
            setting = self._setting_of(joint, ground, pins, submesh)
            roomy = replace(setting, memory_bytes=_ROOMY, partial_sums=partial_sums)
            plan = self._tried(joint, shard, roomy)
        if plan is not None:
            self._known[key] = joint, plan
            peak = self._peak_of(submesh, joint, plan, ground)
            if peak <= self._request.budget_bytes:
                return plan
        return self._fitted(submesh, joint, ground, pins, peak)

    def _setting_of(
        self, joint: SubmeshGraph, ground: SubmeshContext, pins: Pins, submesh: int
    ) -> Setting:
        flight = self._flights[submesh]
        return replace(
            self._setting, cluster=ground.cluster, mesh=ground.tables.prices.mesh, pins=pins,
            resharder=ground.resharder, in_flight=dict.fromkeys(joint.stashed, flight),
        )  # fmt: skip

    def _pins(self, joint: SubmeshGraph) -> Pins:
        """The pins of what the submesh holds."""
        paths = [i.path for i in joint.graph.inputs]
        return tuple(
            (pattern, dims) for pattern, dims in self._request.pins if meant(pattern, paths)
        )

    def _fitted(
        self, submesh: int, joint: SubmeshGraph, ground: SubmeshContext, pins: Pins, known: int
    ) -> ShardingPlan:
        """A plan whose peak is within the budget: by recipes, then under a limit.

        Large stages are not tried again: other stages are sooner found than another sharding.
        """
        budget = self._request.budget_bytes
        setting = self._setting_of(joint, ground, pins, submesh)
        least = known
        attempts = self._attempts(ground, budget) if joint.graph.op_count <= _SMALL else ()
        for shard, memory_bytes in attempts:
            within = replace(setting, memory_bytes=memory_bytes, partial_sums=False)
            plan = self._tried(joint, shard, within)
            if plan is None:
                continue
            peak = self._peak_of(submesh, joint, plan, ground)
            if peak <= budget:
                return plan
            least = min(least, peak)
        raise self._refusal(submesh, least)

    def _attempts(
        self, ground: SubmeshContext, budget: int
    ) -> Iterator[tuple[AbstractSharding, int]]:
        """Passes and their limits, the quick ones first."""

        def quick(recipe: AbstractRecipe) -> Optimal:
            return Optimal(recipe, QUICK, explain=False, reshard_costs=ground.tables)

        method = self._request.method
        for name in _LEAN if method == "auto" else ():
            yield quick(recipe_named(name)), _ROOMY
        recipe = recipe_named(method)
        yield quick(recipe), budget
        yield MinMemory(recipe=recipe, reshard_costs=ground.tables), budget

    def _tried(
        self, joint: SubmeshGraph, shard: AbstractSharding, setting: Setting
    ) -> ShardingPlan | None:
        try:
            return setting.watched("shard", joint, lambda: shard.run(joint.graph, setting))
        except InfeasibleError:
            return None

    def _peak_of(
        self, submesh: int, joint: SubmeshGraph, plan: ShardingPlan, ground: SubmeshContext
    ) -> int:
        costs = [
            costs_of(s, self._parts, joint, plan, ground.tables, self._stages.microbatches)
            for s, stage in enumerate(self._stages.stages)
            if stage.submesh == submesh
        ]  # fmt: skip
        return peak_bytes(costs, self._flights[submesh])

    def _refusal(self, submesh: int, least: int) -> MemoryLimitError:
        layers = self._stages.layers.layers
        held = [s for s in self._stages.stages if s.submesh == submesh]
        names = ", ".join(f"{layers[s.first].name}..{layers[s.last].name}" for s in held)
        flight = self._flights[submesh]
        return MemoryLimitError(
            f"stage {names} on mesh{submesh} ({self._stages.submeshes[submesh].mesh}) needs "
            f"{show_bytes(least)} a device and may hold {show_bytes(self._request.budget_bytes)}, "
            f"with {flight} microbatches in flight under {self._stages.schedule}.\n"
            "Try more stages, more microbatches, schedule='1f1b', or more devices."
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
