"""Shards the stages of each submesh within the memory of its devices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost.listing import Seconds
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.graph import Graph, Operand
from autopar.ir.paths import meant
from autopar.ir.program import SubmeshGraph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.text import show_bytes
from autopar.ir.values import Value
from autopar.passes.base import Setting
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.optimal import MinMemory, Optimal
from autopar.passes.shard.recipes import AbstractRecipe, recipe_named
from autopar.passes.shard.solver.effort import QUICK
from autopar.planner.fit_within import fit_within
from autopar.planner.placed_stages import PlacedStages, SubmeshContext
from autopar.planner.request import Pins, Request
from autopar.planner.stage_costs import peak_bytes
from autopar.planner.stage_programs import cost_stage

_ROOMY = 2**60  # bytes that bind nothing
_SMALL = 1500  # ops of a stage up to which other shardings are tried where one does not fit
_LEAN = ("megatron", "fsdp", "fsdp+tp")  # recipes that cut up parameters and optimizer state


@dataclass(frozen=True)
class SubmeshPlan:
    """A sharding of a submesh, what a device holds of its stages, and what they take."""

    sharding: ShardingPlan
    peak_bytes: int
    seconds: float

    @classmethod
    def of(cls, placed: PlacedStages, submesh: int, sharding: ShardingPlan) -> SubmeshPlan:
        """The sharding, weighed by the listings of its parts."""
        costs = [cost_stage(placed, s, sharding) for s in placed.stages_on(submesh)]
        runs = placed.stages.microbatches
        seconds = sum((c.of_step(runs) for c in costs), Seconds()).total
        return cls(sharding, peak_bytes(costs, placed.in_flight[submesh]), seconds)

    @property
    def cost(self) -> float:
        """The sum that the solver minimized, in seconds."""
        return self.sharding.outcome.seconds


class SubmeshSharder:
    """Shards the stages of each submesh; isomorphic submeshes take one answer."""

    def __init__(self, placed: PlacedStages, request: Request, setting: Setting) -> None:
        self._placed, self._request, self._setting = placed, request, setting
        self._known: dict[object, tuple[SubmeshGraph, ShardingPlan]] = {}

    def shard(self, submesh: int, recipe: str, partial_sums: bool) -> ShardingPlan:
        """The plan of a submesh; raises MemoryLimitError where nothing fits its devices.

        First the recipe that the stage's price is of, without a limit: it is known to fit, or
        nearly. Then recipes that hold less, and what keeps the limit. Large stages are not tried
        again: other stages are sooner found than another sharding.
        """
        joint, ground = self._placed.graphs[submesh], self._placed.contexts[submesh]
        limit, method = self._request.budget_bytes, self._request.method
        pins = self._pins(joint)
        setting = self._setting_of(joint, ground, pins, submesh)
        is_small = joint.graph.op_count <= _SMALL

        def tried(shard: AbstractSharding, within: Setting) -> SubmeshPlan | None:
            try:
                plan = within.watched("shard", joint, lambda: shard.run(joint.graph, within))
            except InfeasibleError:
                return None
            return SubmeshPlan.of(self._placed, submesh, plan)

        def roomy() -> Iterator[SubmeshPlan | None]:
            mesh = ground.tables.prices.mesh
            key = (
                structure_hash(joint.graph), mesh, str(ground.cluster), pins, recipe, partial_sums,
            )  # fmt: skip
            known = self._known.get(key)
            if known is not None:
                plan = rename_plan(known[1], known[0].graph, joint.graph)
                yield SubmeshPlan.of(self._placed, submesh, plan)
            else:
                without = replace(setting, memory_bytes=_ROOMY, partial_sums=partial_sums)
                found = tried(self._quick(recipe_named(recipe), ground), without)
                if found is not None:
                    self._known[key] = joint, found.sharding
                yield found
            for name in _LEAN if is_small and method == "auto" else ():
                without = replace(setting, memory_bytes=_ROOMY, partial_sums=False)
                yield tried(self._quick(recipe_named(name), ground), without)

        def solve(allowed: int) -> SubmeshPlan | None:
            within = replace(setting, memory_bytes=allowed, partial_sums=False)
            return tried(self._quick(recipe_named(method), ground), within) if is_small else None

        def lightest() -> Iterator[SubmeshPlan | None]:
            if is_small:
                shard = MinMemory(recipe=recipe_named(method), reshard_costs=ground.tables)
                yield tried(shard, replace(setting, memory_bytes=limit, partial_sums=False))

        fit = fit_within(limit, solve, roomy(), lightest=lightest())
        if fit.best is None:
            raise self._refusal(submesh, fit.fewest_bytes)
        return fit.best.sharding

    def _setting_of(
        self, joint: SubmeshGraph, ground: SubmeshContext, pins: Pins, submesh: int
    ) -> Setting:
        flight = self._placed.in_flight[submesh]
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

    def _quick(self, recipe: AbstractRecipe, ground: SubmeshContext) -> Optimal:
        return replace(
            self._request.shard, recipe=recipe, effort=QUICK, explain=False,
            reshard_costs=ground.tables,
        )  # fmt: skip

    def _refusal(self, submesh: int, least: float) -> MemoryLimitError:
        stages = self._placed.stages
        layers = stages.layers.layers
        held = [s for s in stages.stages if s.submesh == submesh]
        names = ", ".join(f"{layers[s.first].name}..{layers[s.last].name}" for s in held)
        flight = self._placed.in_flight[submesh]
        return MemoryLimitError(
            f"stage {names} on mesh{submesh} ({stages.submeshes[submesh].mesh}) needs "
            f"{show_bytes(least)} a device and may hold {show_bytes(self._request.budget_bytes)}, "
            f"with {flight} microbatches in flight under {stages.schedule}.\n"
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
