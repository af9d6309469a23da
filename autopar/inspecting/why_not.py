"""A plan solved again under pins, on its mesh and in its stages, beside its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import ArgumentError
from autopar.inspecting.compare import moved, traffic_changes
from autopar.inspecting.loaded_plan import Listed, LoadedPlan
from autopar.inspecting.reshardable_unit import (
    ReshardableUnit,
    Weighed,
    price_of,
    too_large,
    units_of,
)
from autopar.ir.explanation import Counterfactual
from autopar.ir.naming import and_more
from autopar.ir.paths import meant
from autopar.passes.base import Pins
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.diagnose.why import case_of, homed
from autopar.passes.shard.model.pins import resolve_pins, show_spec
from autopar.planner.best_mesh import best_of, try_meshes
from autopar.planner.memory_fit import MeshContext, MeshPlan, StepOnMesh
from autopar.planner.remat import Form
from autopar.planner.request import Request, pins_on

_SAME = 1e-9  # of the seconds


@dataclass(frozen=True)
class _Pair:
    """A unit as the plan has it and as the pins would."""

    unit: ReshardableUnit
    before: Weighed
    after: Weighed


def why_not(loaded: LoadedPlan, pins: Pins) -> Counterfactual:
    """Solve the plan with these pins; where there is no such plan, tell why.

    The plan's own pins give way where both are of one argument. Raises PinError where a pin matches
    nothing, names no axis of the mesh, or does not divide what it pins.
    """
    asking = _Asking(loaded, pins, (*_kept_pins(loaded, pins), *pins))
    asking.check()
    pairs = asking.unchanged() if asking.is_kept else asking.pairs()
    texts = tuple(f"{pattern} = {show_spec(dims)}" for pattern, dims in pins)
    notes = tuple(asking.notes())
    if isinstance(pairs, str):
        (first, *_) = asking.unchanged()
        return Counterfactual(texts, first.before.price, None, (), (), pairs, notes)
    changes = (m for p in pairs for m in moved(p.unit, p.before.sharding, p.after.sharding))
    traffic = traffic_changes([p.before for p in pairs], [p.after for p in pairs])
    first = pairs[0]
    return Counterfactual(
        texts, first.before.price, first.after.price, traffic, tuple(dict.fromkeys(changes)), "",
        notes,
    )  # fmt: skip


def _kept_pins(loaded: LoadedPlan, pins: Pins) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    """The plan's own pins, but for what others are asked of now."""
    paths = [i.path for i in loaded.batching.graph.inputs]
    asked = {path for pattern, _ in pins for path in meant(pattern, paths)}
    for pattern, dims in loaded.plan.origin.pins:
        mine = meant(pattern, paths)
        if asked.isdisjoint(mine):
            yield pattern, dims
        else:
            yield from ((path, dims) for path in mine if path not in asked)


@dataclass(frozen=True)
class _Asking:
    """The pins that are asked about, and every pin that would then be in force."""

    loaded: LoadedPlan
    asked: Pins
    every: Pins

    @property
    def _is_one(self) -> bool:
        """True if the step is one program: all pins are about it."""
        return self.loaded.plan.is_one_program

    def check(self) -> None:
        """Raise PinError where the pins cannot be meant."""
        graph, units = self.loaded.batching.graph, self._units
        for unit in units:
            own = self.asked if self._is_one else pins_on(unit.graph, self.asked)
            resolve_pins(unit.graph, own, unit.kept.mesh)
        if not units:
            resolve_pins(graph, self.asked, self.loaded.plan.mesh)
            names = ", ".join(repr(pattern) for pattern, _ in self.asked)
            raise ArgumentError(f"no op of the step reads {names}: it is replicated, at no cost")

    @cached_property
    def _units(self) -> list[ReshardableUnit]:
        """The units that the pins are about: the step, or submeshes that hold what is pinned."""
        units = units_of(self.loaded)
        if self._is_one or not self.asked:
            return units
        return [s for s in units if pins_on(s.graph, self.asked)]

    @property
    def is_kept(self) -> bool:
        """True if all that is pinned lies so in the plan."""
        for unit in self._units:
            own = pins_on(unit.graph, self.asked)
            fixed = resolve_pins(unit.graph, own, unit.kept.mesh)
            planned = {i.path: unit.kept.sharding_of[i.value.name].dims for i in unit.graph.inputs}
            if any(planned[path] != dims for path, dims in fixed.items()):
                return False
        return True

    def unchanged(self) -> list[_Pair]:
        """The plan beside itself."""
        weighed = [(s, s.weighed(s.kept, s.kept.outcome.seconds)) for s in self._units]
        return [_Pair(s, w, w) for s, w in weighed]

    def pairs(self) -> list[_Pair] | str:
        """The units before and after, or why there is no such plan."""
        if not self._is_one:
            return self._stages()
        (unit,) = self._units
        origin, plan = self.loaded.plan.origin, self.loaded.plan
        request = Request(
            self.loaded.cluster, plan.mesh, PassPipeline.of_options(origin.method),
            origin.memory_bytes, self.every, remat=False,
        )  # fmt: skip
        site, form = MeshContext.of(plan.mesh, request), Form(None, unit.graph, plan.recomputation)
        best = best_of(try_meshes([site], form))
        if best is None:
            return str(StepOnMesh(site, form).refusal())
        (_, found) = best
        before = unit.weighed(unit.kept, plan.outcome.seconds)
        return [_Pair(unit, before, self._nearest(unit, found))]

    def _nearest(self, unit: ReshardableUnit, found: MeshPlan) -> Weighed:
        """The plan that was found, without what it moves for nothing."""
        sharding, limit = found.sharding, self.loaded.plan.origin.memory_bytes
        price = price_of(found.spent, found.seconds, found.cost, found.peak_bytes)
        listing = Listed(unit.graph, sharding, found.listing, unit.tables.prices)
        case = unit.case(self.every, sharding.reuse_gathered)
        chosen = case_of(case.posed, sharding, sharding.reuse_gathered).chosen
        near = homed(case, chosen, (), limit)
        if near != chosen:
            weighed = unit.weighed(case.plan(near), found.cost)
            same = abs(weighed.price.seconds - price.seconds) <= _SAME * price.seconds
            if same and weighed.price.peak_bytes <= max(limit, price.peak_bytes):
                return weighed
        return Weighed(sharding, (listing,), price)

    def _stages(self) -> list[_Pair] | str:
        """Each submesh that holds what is pinned sharded anew, one after the other."""
        loaded, pairs = self.loaded, list[_Pair]()
        for unit in self._units:
            weighed, least = unit.resharded(pins_on(unit.graph, self.every))
            if weighed is None:
                limit = loaded.plan.origin.memory_bytes
                return f"mesh{unit.submesh}: {too_large(least, limit)}"
            loaded = loaded.with_sharding(unit.submesh, weighed.sharding)
        others = units_of(loaded)
        for unit in self._units:
            before = unit.weighed(unit.kept, unit.kept.outcome.seconds)
            other = others[unit.submesh]
            after = other.weighed(other.kept, other.kept.outcome.seconds)
            pairs.append(_Pair(unit, before, after))
        return pairs

    def notes(self) -> Iterator[str]:
        """Remarks on what was held as it is."""
        plan, units = self.loaded.plan, self._units
        if self.is_kept:
            yield "the plan has these shardings already: nothing changes"
        if plan.is_one_program:
            yield f"the mesh ({plan.mesh}) is kept"
        else:
            names = ", ".join(f"mesh{s.submesh}" for s in units)
            yield (
                "stages, microbatches, schedule and meshes are kept; solved again: "
                f"{names}, whose collectives these are; memory is that of mesh{units[0].submesh}"
            )
        if plan.recomputed:
            yield f"the {len(plan.recomputed)} values that are recomputed are kept"
        kept = [f"{p} = {show_spec(d)}" for p, d in self.every if (p, d) not in self.asked]
        if kept:
            yield f"the plan's own pins are kept: {and_more(kept, 3)}"
