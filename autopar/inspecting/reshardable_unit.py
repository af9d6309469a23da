"""The unit that one sharding decision covers: the whole step, or one submesh's work; its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.stage import peak_bytes
from autopar.cost.timeline import Seconds
from autopar.inspecting.loaded_plan import Listed, LoadedPlan, list_part
from autopar.ir.explanation import Price
from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.text import show_bytes
from autopar.passes.base import NO_LIMIT_BYTES, Pins, Setting
from autopar.passes.shard.diagnose.why import Answer, Case, anew, case_of
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import recipe_named
from autopar.planner.fit_within import fit_within
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.request import pins_on
from autopar.planner.stage_programs import cost_stage


@dataclass(frozen=True)
class Weighed:
    """A sharding of a unit, the listings that it means, and what a step takes with it."""

    sharding: ShardingPlan
    listings: tuple[Listed, ...]
    price: Price

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds."""
        return self.price.peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.price.seconds

    @property
    def cost(self) -> float:
        """The sum that the solver minimized, in seconds."""
        return self.price.solver_seconds


@dataclass(frozen=True)
class ReshardableUnit:
    """The unit that one sharding decision covers: all that a submesh runs in a step.

    Of a step that is one program that is the step. Everything else of the plan is held as it is.
    """

    loaded: LoadedPlan
    submesh: int

    @property
    def placed(self) -> PlacedStages:
        """The stages of the plan on their submeshes."""
        return self.loaded.placed

    @property
    def graph(self) -> Graph:
        """The parts of the submesh as one graph."""
        return self.placed.graphs[self.submesh].graph

    @property
    def kept(self) -> ShardingPlan:
        """The plan's own sharding of the submesh."""
        return self.loaded.plan.submeshes[self.submesh].sharding

    @property
    def tables(self) -> ReshardCosts:
        """The prices of the submesh."""
        return self.placed.contexts[self.submesh].tables

    def weighed(self, sharding: ShardingPlan, solver_seconds: float) -> Weighed:
        """The price of a step with another sharding of this submesh; bytes are this submesh's.

        Where stages are one program its ticks are kept, and its peak moves by what this submesh's
        own does.
        """
        placed, own = self.placed, self.placed.stages_on(self.submesh)
        parts = [p for p in placed.parts if p.submesh == self.submesh]
        listings = tuple(list_part(placed, part, sharding) for part in parts)
        programs = self.loaded.programs
        costs = list(programs.costs)
        if sharding is not self.kept:
            for s in own:
                made = [m.listing for p, m in zip(parts, listings, strict=True) if p.stage == s]
                costs[s] = cost_stage(placed, s, sharding, made)
        mine = [costs[s] for s in own]
        spent = sum((c.of_step(placed.stages.microbatches) for c in mine), Seconds())
        peak = peak_bytes(mine, placed.in_flight[self.submesh])
        if programs.spmd is not None:
            own_costs = [programs.costs[s] for s in own]
            apart = peak_bytes(own_costs, placed.in_flight[self.submesh])
            peak += programs.peak_bytes[self.submesh] - apart
        price = price_of(spent, programs.timed(costs).seconds, solver_seconds, peak)
        return Weighed(sharding, listings, price)

    def setting(self, pins: Pins, partial_sums: bool | None = None) -> Setting:
        """The setting of the sharding pass within the plan's limit.

        Sums over microbatches may lie as they do in the plan, unless `partial_sums` says it.
        """
        prices, limit = self.tables.prices, self.loaded.plan.origin.memory_bytes
        apart = self.has_partial_sums if partial_sums is None else partial_sums
        given = Setting(prices.cluster, prices.mesh, limit, partial_sums=apart)
        return self.placed.setting(self.submesh, pins, given)

    @property
    def has_partial_sums(self) -> bool:
        """True if the plan has sums over microbatches elsewhere than where they are read."""
        if self.placed.stages.is_one_program:
            return True
        moved, lies = {name for name, _, _ in self.kept.uses}, self.kept.sharding_of
        parts = (p for p in self.placed.parts if p.submesh == self.submesh)
        sums = {a.value for p in parts for a in p.accumulators}
        return any(name in moved or lies[name].partial for name in sums if name in lies)

    def case(self, pins: Pins, reuse_gathered: bool, partial_sums: bool | None = None) -> Case:
        """The problem under some pins, with the plan's answer as far as these allow."""
        recipe = recipe_named(self.loaded.plan.origin.method)
        optimal = Optimal(recipe=recipe, reshard_costs=self.tables, reuse_gathered=reuse_gathered)
        setting = self.setting(pins, partial_sums)
        priced = optimal.price(self.graph, setting, pins, recipe)
        return case_of(priced.within(setting.memory_bytes), self.kept, reuse_gathered)

    def own_case(self) -> Case:
        """The problem that the plan answers, with its answer."""
        return self.case(self.own_pins, self.kept.reuse_gathered)

    @property
    def own_pins(self) -> Pins:
        """The plan's pins of what is here."""
        return pins_on(self.graph, self.loaded.plan.origin.pins)

    def resharded(self, pins: Pins) -> tuple[Weighed | None, float]:
        """The plan under some pins, found as `planner.submesh_sharding` finds one.

        That is without a limit, with sums over microbatches where that is fastest; where this
        holds too much, within the limit and with sums that lie as they are read. None where there
        is none, with the fewest bytes that were needed.
        """
        limit = self.loaded.plan.origin.memory_bytes
        roomy = self.case(pins, self.kept.reuse_gathered, partial_sums=True)
        found = anew(roomy, {}, NO_LIMIT_BYTES)
        if found.choice:
            weighed = self.weighed(roomy.plan(found.choice), found.seconds)
            if weighed.peak_bytes <= limit:
                return weighed, weighed.peak_bytes
        tight = self.case(pins, self.kept.reuse_gathered, partial_sums=False)
        return self.fitting(tight, {}, anew(tight, {}, limit))

    def fitting(
        self, case: Case, fixed: Mapping[int, int], found: Answer
    ) -> tuple[Weighed | None, float]:
        """The plan of an answer, or of the nearest that keeps the limit.

        None where there is none, with the fewest bytes that were needed.
        """

        def weighed(answer: Answer) -> Weighed | None:
            return self.weighed(case.plan(answer.choice), answer.seconds) if answer.choice else None

        first = weighed(found)
        if first is None:
            return None, found.needed_bytes
        limit = self.loaded.plan.origin.memory_bytes
        fit = fit_within(limit, lambda n: weighed(anew(case, fixed, n)), first=first)
        return fit.best, fit.fewest_bytes


def units_of(loaded: LoadedPlan) -> list[ReshardableUnit]:
    """The units that a plan shards, submesh by submesh."""
    return [ReshardableUnit(loaded, k) for k in range(len(loaded.plan.submeshes))]


def too_large(needed: float, limit: int) -> str:
    """Why there is no plan within a limit."""
    if needed <= limit:
        return f"no plan was found that fits {show_bytes(limit)} a device"
    return (
        f"it needs {show_bytes(needed)} a device, {show_bytes(needed - limit)} more than the limit "
        f"of {show_bytes(limit)}"
    )


def price_of(spent: Seconds, seconds: float, solver_seconds: float, peak_bytes: int) -> Price:
    """The price of a step that spends so long on a device, and holds so much."""
    return Price(
        seconds=seconds,
        solver_seconds=solver_seconds,
        compute_seconds=spent.compute,
        communication_seconds=spent.communication,
        exposed_seconds=spent.exposed,
        peak_bytes=peak_bytes,
    )
