"""Shards the stages of each submesh within the memory of its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.listing import Seconds
from autopar.cost.stage import StageCost, peak_bytes
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import SpmdProgram
from autopar.ir.text import show_bytes
from autopar.passes.base import NO_LIMIT_BYTES, Setting
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.optimal import MinMemory, Optimal, Priced
from autopar.passes.shard.solver.effort import QUICK
from autopar.planner.fit_within import fit_within, fits
from autopar.planner.isomorphism import Form, Forms, match
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.request import Request, is_small, pins_on
from autopar.planner.stage_costs import cost_stage

_TRIES = 4  # allowances: other stages are sooner found than another sharding
_STEP = 16  # a part of the limit
_TIGHTER = (0.94, 0.88)  # of the limit


@dataclass(frozen=True)
class SubmeshPlan:
    """A sharding of a submesh, what a device holds of its stages, and what they take.

    `listings` are those by which its parts were weighed, by the part's number; a plan that was
    taken over from an isomorphic submesh has none.
    """

    sharding: ShardingPlan
    costs: tuple[StageCost, ...]
    peak_bytes: int
    seconds: float
    listings: Mapping[int, SpmdProgram]

    @classmethod
    def of(cls, placed: PlacedStages, submesh: int, sharding: ShardingPlan) -> SubmeshPlan:
        """The sharding, weighed by the listings of its parts."""
        listings = {
            n: placed.lowered(part, sharding)
            for n, part in enumerate(placed.parts)
            if part.submesh == submesh
        }
        costs = tuple(
            cost_stage(
                placed, s, sharding, [y for n, y in listings.items() if placed.parts[n].stage == s]
            )
            for s in placed.stages_on(submesh)
        )
        return cls.of_costs(placed, submesh, sharding, costs, listings)

    @classmethod
    def of_costs(
        cls, placed: PlacedStages, submesh: int, sharding: ShardingPlan,
        costs: tuple[StageCost, ...], listings: Mapping[int, SpmdProgram],
    ) -> SubmeshPlan:  # fmt: skip
        """The sharding where it is known what the stages cost."""
        runs = placed.stages.microbatches
        seconds = sum((c.of_step(runs) for c in costs), Seconds()).total
        peak = peak_bytes(costs, placed.in_flight[submesh])
        return cls(sharding, costs, peak, seconds, listings)

    @property
    def cost(self) -> float:
        """The sum that the solver minimized, in seconds."""
        return self.sharding.outcome.seconds


class StageMemoryError(MemoryLimitError):
    """The stages of a submesh hold more than its devices may, however they are sharded."""

    def __init__(self, message: str, submesh: int, peak_bytes: int) -> None:
        MemoryLimitError.__init__(self, message)
        self.submesh, self.peak_bytes = submesh, peak_bytes


class SubmeshSharder:
    """Shards the stages of each submesh; isomorphic submeshes take one answer."""

    def __init__(self, placed: PlacedStages, request: Request, setting: Setting) -> None:
        self._placed, self._request, self._setting = placed, request, setting
        self._forms = Forms()
        self._known: dict[object, list[tuple[Form, SubmeshPlan]]] = {}
        self._priced: dict[tuple[int, bool], Priced] = {}

    def shard(self, submesh: int, partial_sums: bool) -> SubmeshPlan:
        """The plan of a submesh; raises StageMemoryError where nothing fits its devices.

        First what an isomorphic submesh was given. Then, where the stage's price is of that, the
        fastest without a limit; what keeps the limit; and of small stages what holds the least.
        """
        joint, context = self._placed.graphs[submesh], self._placed.contexts[submesh]
        limit, mesh = self._request.budget_bytes, context.tables.prices.mesh
        shard, setting = self._given(submesh)
        form = self._forms.of(joint, self._marks(submesh), self._standing(submesh))
        parts = tuple(
            (p.kind, p.loop, p.round, len(p.equations))
            for p in self._placed.parts
            if p.submesh == submesh
        )
        key = form.key, parts, mesh, str(context.cluster), setting.pins, partial_sums

        def roomy() -> Iterator[SubmeshPlan | None]:
            yield self._known_plan(submesh, form, self._known.get(key, ()))
            if partial_sums:
                within = replace(setting, memory_bytes=NO_LIMIT_BYTES, partial_sums=True)
                yield self._tried(submesh, shard, within)

        def solve(allowed: int) -> SubmeshPlan | None:
            return self._tried(submesh, shard, replace(setting, memory_bytes=allowed))

        def priced() -> Priced:
            return self._priced_step(submesh, shard, setting)

        def lightest() -> Iterator[SubmeshPlan | None]:
            if is_small(joint.graph):
                leanest = MinMemory(shard.recipe, context.tables, priced)
                yield self._tried(submesh, leanest, setting)

        fit = fit_within(limit, solve, roomy(), lightest=lightest(), tries=_TRIES)
        if fit.best is None:
            raise self._refusal(submesh, fit.fewest_bytes)
        self._known.setdefault(key, []).append((form, fit.best))
        return fit.best

    def _known_plan(
        self, submesh: int, form: Form, known: Sequence[tuple[Form, SubmeshPlan]]
    ) -> SubmeshPlan | None:
        """The plan of an isomorphic submesh; weighed anew where its ops have another order."""
        found = [(m, plan) for other, plan in known if (m := match(other, form)) is not None]
        for matched, plan in found:
            if matched.in_order:
                renamed = matched.plan(plan.sharding)
                return SubmeshPlan.of_costs(self._placed, submesh, renamed, plan.costs, {})
        for matched, plan in found[:1]:
            return SubmeshPlan.of(self._placed, submesh, matched.plan(plan.sharding))
        return None

    def quickened(self, submesh: int, plan: SubmeshPlan) -> SubmeshPlan:
        """The fastest of a submesh's plan and those within tighter limits than its devices'.

        The solver's sum, in which nothing overlaps, and the seconds of a listing rank plans
        differently by a per cent. All wait for the slowest submesh, so there that is looked into.
        """
        shard, setting = self._given(submesh)
        for share in _TIGHTER:
            within = replace(setting, memory_bytes=int(share * self._request.budget_bytes))
            found = self._tried(submesh, shard, within)
            if found is None or not fits(found, self._request.budget_bytes):
                continue
            plan = min(plan, found, key=lambda p: p.seconds)
        return plan

    def _given(self, submesh: int) -> tuple[Optimal, Setting]:
        """The pass for a submesh, and its setting within the limit."""
        request, context = self._request, self._placed.contexts[submesh]
        shard = replace(request.shard, effort=QUICK, explain=False, reshard_costs=context.tables)
        pins = pins_on(self._placed.graphs[submesh].graph, request.pins)
        given = replace(self._setting, partial_sums=False, memory_bytes=request.budget_bytes)
        return shard, self._placed.setting(submesh, pins, given)

    def _tried(self, submesh: int, shard: AbstractSharding, setting: Setting) -> SubmeshPlan | None:
        """The plan that a pass finds for a submesh; None where it finds none."""
        if isinstance(shard, Optimal):
            optimal = shard
            shard = replace(shard, priced=lambda: self._priced_step(submesh, optimal, setting))
        passes = replace(self._request.passes, shard=shard)
        try:
            plan = passes.shard_graph(self._placed.graphs[submesh].graph, setting)
        except InfeasibleError:
            return None
        return SubmeshPlan.of(self._placed, submesh, plan)

    def _priced_step(self, submesh: int, shard: Optimal, setting: Setting) -> Priced:
        """The work of a submesh with its prices, which no limit changes."""
        key = submesh, setting.partial_sums
        if key not in self._priced:
            graph = self._placed.graphs[submesh].graph
            self._priced[key] = shard.price(graph, setting, setting.pins, shard.recipe)
        return self._priced[key]

    def _marks(self, submesh: int) -> list[object]:
        """The parts that run each op of a submesh, and the place in time of those of a loop."""
        runs: dict[int, list[object]] = {}
        looped: set[int] = set()
        for n, part in enumerate(p for p in self._placed.parts if p.submesh == submesh):
            for e in part.equations:
                runs.setdefault(e, []).append(n)
            looped.update(part.equations if part.is_looped else ())
        place = {e: n for n, e in enumerate(sorted(looped))}
        equations = self._placed.graphs[submesh].equations
        return [(tuple(runs[e]), place.get(e, -1)) for e in equations]

    def _standing(self, submesh: int) -> dict[str, object]:
        """The standing of some values of a submesh, which the ops that touch them do not tell."""
        joint, held = self._placed.graphs[submesh], self._placed.held_often(submesh)
        stashed = frozenset(joint.stashed)
        lasting = {name: holding for name, holding in held.items() if holding.throughout}
        return {
            name: (lasting.get(name), name in stashed, name in joint.final)
            for name in {*lasting, *stashed, *joint.final}
        }

    def _refusal(self, submesh: int, least: float) -> StageMemoryError:
        stages = self._placed.stages
        layers = stages.layers.layers
        held = [s for s in stages.stages if s.submesh == submesh]
        names = ", ".join(f"{layers[s.first].name}..{layers[s.last].name}" for s in held)
        flight, budget = self._placed.in_flight[submesh], self._request.budget_bytes
        # Where nothing was found at all, some more than there is.
        needed = int(least) if math.isfinite(least) else budget + budget // _STEP
        return StageMemoryError(
            f"stage {names} on mesh{submesh} ({stages.submeshes[submesh].mesh}) needs "
            f"{show_bytes(needed)} a device and may hold {show_bytes(budget)}, "
            f"with {flight} microbatches in flight under {stages.schedule}.\n"
            "Try more stages, more microbatches, schedule='1f1b', or more devices.",
            submesh,
            needed,
        )
