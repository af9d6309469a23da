"""What of a plan is sharded as one, the step or what a submesh runs, and what a sharding takes."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.listing import Seconds
from autopar.cost.memory import held_bytes
from autopar.cost.overlap import listing_seconds
from autopar.inspecting.reopen import Opened
from autopar.ir.explanation import Price
from autopar.ir.graph import Graph
from autopar.ir.paths import meant
from autopar.ir.plan import Plan
from autopar.ir.program import SubmeshGraph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import SpmdProgram
from autopar.ir.text import show_bytes
from autopar.passes.base import Setting
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan
from autopar.passes.lower.spmd import lower_spmd
from autopar.passes.shard.diagnose.why import Answer, Case, anew, case_of
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import recipe_named
from autopar.planner.request import Pins
from autopar.planner.restored_stages import RestoredStages
from autopar.planner.stage_costs import StageCosts
from autopar.planner.step_timing import timing_of
from autopar.planner.submesh_sharding import costs_of, peak_bytes, peak_in_flight

_TIGHTENINGS = 3  # of the limit, where what the memory rows leave out is over it


@dataclass(frozen=True)
class Listing:
    """A listing of a graph that a device runs `runs` times a step."""

    graph: Graph
    program: SpmdProgram
    runs: int


@dataclass(frozen=True)
class Weighed:
    """A sharding of a scope, the listings that it means, and what a step takes with it."""

    sharding: ShardingPlan
    listings: tuple[Listing, ...]
    price: Price


@dataclass(frozen=True)
class AbstractScope(abc.ABC):
    """What a plan shards as one; everything else of the plan is held as it is."""

    opened: Opened
    submesh: int

    @property
    @abc.abstractmethod
    def graph(self) -> Graph:
        """What is sharded."""

    @property
    @abc.abstractmethod
    def kept(self) -> ShardingPlan:
        """The plan's own sharding."""

    @property
    @abc.abstractmethod
    def tables(self) -> ReshardCosts:
        """The prices there."""

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Values of which several microbatches' are held at once."""
        return {}

    @abc.abstractmethod
    def weighed(self, sharding: ShardingPlan, solver_seconds: float) -> Weighed:
        """What a step takes with another sharding."""

    def setting(self, pins: Pins) -> Setting:
        """What the sharding pass is given, within the plan's limit."""
        prices, resharder = self.tables.prices, self.tables.resharder
        limit = self.opened.plan.origin.memory_bytes
        return Setting(
            prices.cluster, prices.mesh, limit, pins, resharder=resharder, in_flight=self.in_flight
        )

    def case(self, pins: Pins, reuse_gathered: bool) -> Case:
        """The problem under some pins, with the plan's answer as far as these allow."""
        recipe = recipe_named(self.opened.plan.origin.method)
        optimal = Optimal(recipe=recipe, reshard_costs=self.tables, reuse_gathered=reuse_gathered)
        posed = optimal.pose(self.graph, self.setting(pins), pins, recipe)
        return case_of(posed, self.kept, reuse_gathered)

    def own_case(self) -> Case:
        """The problem that the plan answers, with its answer."""
        return self.case(self.own_pins, self.kept.reuse_gathered)

    @property
    def own_pins(self) -> Pins:
        """The plan's pins of what is here."""
        return pins_of(self.graph, self.opened.plan.origin.pins)

    def fitting(
        self, case: Case, fixed: Mapping[int, int], found: Answer
    ) -> tuple[Weighed | None, float]:
        """An answer's plan; the limit is tightened until what is really held fits it.

        None where that is nowhere, with the fewest bytes that were needed.
        """
        limit = allowed = self.opened.plan.origin.memory_bytes
        least = float("inf")
        for _ in range(_TIGHTENINGS):
            if not found.choice:
                break
            weighed = self.weighed(case.plan(found.choice), found.seconds)
            least = min(least, weighed.price.peak_bytes)
            over = weighed.price.peak_bytes - limit
            if over <= 0:
                return weighed, least
            allowed -= max(over, limit // 64)
            if allowed <= 0:
                break
            found = anew(case, fixed, allowed)
        return None, least if least < float("inf") else found.needed_bytes


@dataclass(frozen=True)
class WholeStep(AbstractScope):
    """A step that is one program on one mesh."""

    @property
    def graph(self) -> Graph:
        """The step."""
        return self.opened.batching.graph

    @property
    def kept(self) -> ShardingPlan:
        """The plan's own sharding."""
        return self.opened.plan.sharding

    @property
    def tables(self) -> ReshardCosts:
        """The prices of the plan's mesh."""
        return self._tables

    @cached_property
    def _tables(self) -> ReshardCosts:
        return ReshardCosts(self.opened.listings[0].prices)

    def weighed(self, sharding: ShardingPlan, solver_seconds: float) -> Weighed:
        """What a step takes with another sharding."""
        graph, prices = self.graph, self.tables.prices
        if sharding is self.kept:
            listing = Listing(graph, self.opened.listings[0].program, 1)
            return Weighed(sharding, (listing,), predicted(self.opened.plan, solver_seconds))
        program = lower_spmd(graph, sharding, self.tables.resharder)
        timed = listing_seconds(graph, program, prices)
        held = held_bytes(graph, program, prices.mesh, prices.cluster.chip.platform)
        return Weighed(
            sharding,
            (Listing(graph, program, 1),),
            price_of(timed, timed.total, solver_seconds, held.peak_bytes),
        )


@dataclass(frozen=True)
class Stages:
    """The stages of a plan with what they take, which the scopes of its submeshes share."""

    opened: Opened
    laid: RestoredStages

    @cached_property
    def joints(self) -> tuple[SubmeshGraph, ...]:
        """The parts of each submesh as one graph."""
        return self.laid.joints()

    @cached_property
    def costs(self) -> tuple[StageCosts, ...]:
        """What every stage takes as the plan has it."""
        pipeline = self.opened.plan.pipeline
        assert pipeline is not None
        stages = self.laid.stages.stages
        return tuple(self.cost(s, pipeline.shardings[t.submesh]) for s, t in enumerate(stages))

    def cost(self, stage: int, sharding: ShardingPlan) -> StageCosts:
        """What a stage takes where its submesh is sharded so."""
        laid, submesh = self.laid, self.laid.stages.stages[stage].submesh
        tables, runs = laid.grounds[submesh].tables, laid.stages.microbatches
        return costs_of(stage, laid.parts, self.joints[submesh], sharding, tables, runs)


@dataclass(frozen=True)
class OneSubmesh(AbstractScope):
    """All that the stages of one submesh run, in a plan of stages."""

    stages: Stages

    @property
    def laid(self) -> RestoredStages:
        """The stages and where they lie."""
        return self.stages.laid

    @property
    def joint(self) -> SubmeshGraph:
        """The parts of the submesh together."""
        return self.stages.joints[self.submesh]

    @property
    def graph(self) -> Graph:
        """The parts of the submesh as one graph."""
        return self.joint.graph

    @property
    def kept(self) -> ShardingPlan:
        """The plan's own sharding of the submesh."""
        pipeline = self.opened.plan.pipeline
        assert pipeline is not None
        return pipeline.shardings[self.submesh]

    @property
    def tables(self) -> ReshardCosts:
        """The prices of the submesh."""
        return self.laid.grounds[self.submesh].tables

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Values of which several microbatches' are held at once."""
        return dict.fromkeys(self.joint.stashed, peak_in_flight(self.laid.stages)[self.submesh])

    def weighed(self, sharding: ShardingPlan, solver_seconds: float) -> Weighed:
        """What a step takes with another sharding of this submesh; bytes are this submesh's."""
        stages, costs = self.laid.stages, list(self.stages.costs)
        if sharding is not self.kept:
            for s in self._own:
                costs[s] = self.stages.cost(s, sharding)
        timing = timing_of(stages, costs, self.laid.blocks, self.opened.cluster)
        own, runs = [costs[s] for s in self._own], stages.microbatches
        spent = sum((_of_step(c, runs) for c in own), Seconds())
        peak = peak_bytes(own, peak_in_flight(stages)[self.submesh])
        price = price_of(spent, timing.seconds, solver_seconds, peak)
        return Weighed(sharding, tuple(self._listings(sharding)), price)

    @property
    def _own(self) -> list[int]:
        return [s for s, t in enumerate(self.laid.stages.stages) if t.submesh == self.submesh]

    def _listings(self, sharding: ShardingPlan) -> Iterator[Listing]:
        for part in self.laid.parts:
            if part.submesh == self.submesh:
                own = part_plan(part, self.joint, sharding)
                loose = left_partial(part, self.joint)
                program = lower_spmd(part.graph, own, self.tables.resharder, loose)
                runs = self.laid.stages.microbatches if part.is_looped else 1
                yield Listing(part.graph, program, runs)


def scopes_of(opened: Opened) -> list[AbstractScope]:
    """All that a plan shards, one by one: the step, or what each submesh runs."""
    if opened.laid is None:
        return [WholeStep(opened, 0)]
    stages = Stages(opened, opened.laid)
    return [OneSubmesh(opened, k, stages) for k in range(len(opened.laid.grounds))]


def pins_of(graph: Graph, pins: Pins) -> Pins:
    """The pins of what a graph is given."""
    paths = [i.path for i in graph.inputs]
    return tuple(p for p in pins if meant(p[0], paths))


def too_large(needed: float, limit: int) -> str:
    """Why there is no plan within a limit."""
    if needed <= limit:
        return f"no plan was found that fits {show_bytes(limit)} a device"
    return (
        f"it needs {show_bytes(needed)} a device, {show_bytes(needed - limit)} more than the limit "
        f"of {show_bytes(limit)}"
    )


def predicted(plan: Plan, solver_seconds: float) -> Price:
    """What a plan of one program was predicted to take."""
    p = plan.prediction
    spent = Seconds(p.compute_seconds, p.communication_seconds, p.exposed_seconds)
    return price_of(spent, p.seconds, solver_seconds, p.peak_bytes)


def _of_step(costs: StageCosts, runs: int) -> Seconds:
    looped = costs.forward + costs.input_gradient + costs.weight_gradient
    return looped.times(runs) + costs.once


def price_of(spent: Seconds, seconds: float, solver_seconds: float, peak_bytes: int) -> Price:
    """What a step takes that spends so long on a device, and holds so much."""
    return Price(
        seconds=seconds,
        solver_seconds=solver_seconds,
        compute_seconds=spent.compute,
        communication_seconds=spent.communication,
        exposed_seconds=spent.exposed,
        peak_bytes=peak_bytes,
    )
