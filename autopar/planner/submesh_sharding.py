"""Shards the stages of each submesh within the memory of its devices; equal submeshes once.

Submeshes compute the same whatever their values are called and whatever order ops have:

    layers 9, 10, 11 of a stage     layers 12, 13, 14 of another
    forward   9 10 11               12 13 14
    update    10 11 9               12 13 14        (by the names of parameters)

Nodes are inputs and ops. A node's color is what it is by itself, then also what the nodes around it
are, and so on outwards until no color splits (color refinement, after Weisfeiler and Leman). Ops of
a loop are told apart by their order from the start, as equal stages run them in one. Nodes of one
color are paired in order, and every pair is checked, so that what is found is an isomorphism.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.stage import StageCost, peak_bytes
from autopar.cost.timeline import Seconds
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import Listing
from autopar.ir.program import SubmeshGraph
from autopar.ir.sharding_plan import OpPath, ShardingPlan
from autopar.ir.text import show_bytes
from autopar.ir.values import Value
from autopar.passes.base import NO_LIMIT_BYTES, AbstractSharding, Setting
from autopar.passes.shard.optimal import MinMemory, Optimal, Priced
from autopar.passes.shard.solver.effort import QUICK
from autopar.planner.fit_within import fit_within, fits
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.request import Request, is_small, pins_on
from autopar.planner.stage_programs import StagePrograms, cost_stage, lower_stages


@dataclass(frozen=True)
class ColoredGraph:
    """A submesh's graph, and the colors of its inputs and then its ops: by themselves, refined."""

    joint: SubmeshGraph
    bases: tuple[int, ...]
    colors: tuple[int, ...]

    @property
    def key(self) -> object:
        """The colors in rising order, which isomorphic graphs have in common."""
        return tuple(sorted(self.colors))


class NodeColors:
    """Numbers what nodes are, so that those of several graphs compare."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(
        self, joint: SubmeshGraph, marks: Sequence[object], of_value: Mapping[str, object]
    ) -> ColoredGraph:
        """A graph with its colors; `marks` tell ops apart, `of_value` the values of some names."""
        graph = joint.graph
        inputs = [
            self._number((i.value.type_text, i.role.value, of_value.get(i.value.name)))
            for i in graph.inputs
        ]
        ops = [
            self._number((mark, _alone(op), tuple(of_value.get(r.name) for r in op.results)))
            for op, mark in zip(graph.ops, marks, strict=True)
        ]
        bases = (*inputs, *ops)
        return ColoredGraph(joint, bases, self._refined(graph, bases))

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _refined(self, graph: Graph, bases: tuple[int, ...]) -> tuple[int, ...]:
        """Colors that no further hop splits."""
        made = {i.value.name: (n, 0) for n, i in enumerate(graph.inputs)}
        first = len(graph.inputs)
        made.update(
            (r.name, (first + n, place))
            for n, op in enumerate(graph.ops)
            for place, r in enumerate(op.results)
        )
        reads = [[made[o] if isinstance(o, str) else None for o in op.operands] for op in graph.ops]
        read_by: list[list[tuple[int, int, int]]] = [[] for _ in bases]  # place, reader, slot
        for n, read in enumerate(reads):
            for slot, source in enumerate(read):
                if source is not None:
                    read_by[source[0]].append((source[1], first + n, slot))
        returned = dict(graph.donated)
        for o, operand in enumerate(graph.outputs):
            if isinstance(operand, str):
                maker, place = made[operand]
                # What replaces state is read by that state, anything else by nobody.
                read_by[maker].append((place, returned.get(o, -1), -1))
        colors, classes = list(bases), Counter(bases)
        while True:
            # A node that is alone in its color is told apart already.
            open_nodes = [n for n, color in enumerate(colors) if classes[color] > 1]
            near = [
                self._number((
                    colors[n],
                    n >= first and tuple(s and (colors[s[0]], s[1]) for s in reads[n - first]),
                    tuple(sorted((p, colors[r] if r >= 0 else -1, s) for p, r, s in read_by[n])),
                ))
                for n in open_nodes
            ]  # fmt: skip
            for n, color in zip(open_nodes, near, strict=True):
                colors[n] = color
            before, classes = len(classes), Counter(colors)
            if len(classes) == before:
                return tuple(colors)


def _alone(op: Op) -> object:
    """An op by itself: all but the values that it reads."""
    literals = tuple(None if isinstance(o, str) else str(o) for o in op.operands)
    types = tuple(r.type_text for r in op.results)
    bodies = tuple(map(_body, op.graphs))
    return op.kind, op.params, types, literals, op.origin.region, op.runs, bodies


def _body(graph: Graph) -> object:
    """A body, its values known by their order."""
    number = {name: i for i, name in enumerate(graph.values)}

    def known(operand: Operand) -> object:
        return number[operand] if isinstance(operand, str) else str(operand)

    ops = tuple((_alone(op), tuple(map(known, op.operands))) for op in graph.ops)
    inputs = tuple(i.value.type_text for i in graph.inputs)
    return inputs, ops, tuple(map(known, graph.outputs))


@dataclass(frozen=True)
class Match:
    """The values and ops of a graph that stand for those of another."""

    after: Graph
    names: Mapping[str, str]
    ops: tuple[int, ...]  # by op of the other

    @property
    def in_order(self) -> bool:
        """True if the ops stand in one order in both."""
        return self.ops == tuple(range(len(self.ops)))

    def plan(self, plan: ShardingPlan) -> ShardingPlan:
        """The other graph's plan for this one."""
        rank = {name: i for i, name in enumerate(self.after.nested_values)}

        def path(known: OpPath) -> OpPath:
            return self.ops[known[0]], *known[1:]

        values = ((self.names[name], s) for name, s in plan.values)
        uses = ((self.names[name], region, s) for name, region, s in plan.uses)
        assigned = ((path(p), given) for p, given in plan.assignments)
        partials = ((path(p), operands) for p, operands in plan.shared_partials)
        return replace(
            plan,
            values=tuple(sorted(values, key=lambda v: rank[v[0]])),
            assignments=tuple(sorted(assigned, key=lambda a: a[0][0])),
            uses=tuple(sorted(uses, key=lambda u: rank[u[0]])),
            shared_partials=tuple(sorted(partials, key=lambda p: p[0][0])),
        )


def match(before: ColoredGraph, after: ColoredGraph) -> Match | None:
    """The isomorphism of a graph to another; None where pairs of one color do not make one."""
    one, other = before.joint.graph, after.joint.graph
    waiting: dict[int, list[int]] = {}
    for n, color in reversed(list(enumerate(after.colors))):
        waiting.setdefault(color, []).append(n)
    pairs: list[int] = []
    for n, color in enumerate(before.colors):
        left = waiting.get(color)
        if not left or before.bases[n] != after.bases[left[-1]]:
            return None
        pairs.append(left.pop())
    first = len(one.inputs)
    if len(pairs) != len(after.colors) or any(
        (n < first) != (m < first) for n, m in enumerate(pairs)
    ):
        return None
    names = dict(_names(one, other, pairs))
    ops = tuple(m - first for m in pairs[first:])

    def renamed(operand: Operand) -> object:
        return names[operand] if isinstance(operand, str) else str(operand)

    def shown(operand: Operand) -> object:
        return operand if isinstance(operand, str) else str(operand)

    for op, m in zip(one.ops, ops, strict=True):
        if tuple(map(renamed, op.operands)) != tuple(map(shown, other.ops[m].operands)):
            return None
    if Counter(_outputs(one, renamed, pairs)) != Counter(_outputs(other, shown, range(first))):
        return None
    return Match(other, names, ops)


def _names(one: Graph, other: Graph, pairs: Sequence[int]) -> Iterator[tuple[str, str]]:
    first = len(one.inputs)
    for given, m in zip(one.inputs, pairs, strict=False):
        yield given.value.name, other.inputs[m].value.name
    for op, m in zip(one.ops, pairs[first:], strict=True):
        twin = other.ops[m - first]
        yield from zip(map(_name, op.results), map(_name, twin.results), strict=True)
        for body, own in zip(op.graphs, twin.graphs, strict=True):
            yield from zip(body.nested_values, own.nested_values, strict=True)


def _name(value: Value) -> str:
    return value.name


def _outputs(
    graph: Graph, named: Callable[[Operand], object], place: Sequence[int]
) -> Iterator[tuple[object, int]]:
    """The outputs, each with the place of the input that it returns to."""
    returned = dict(graph.donated)
    for o, operand in enumerate(graph.outputs):
        yield named(operand), place[returned[o]] if o in returned else -1


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
    listings: Mapping[int, Listing]

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
        costs: tuple[StageCost, ...], listings: Mapping[int, Listing],
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
        self._colors = NodeColors()
        self._known: dict[object, list[tuple[ColoredGraph, SubmeshPlan]]] = {}
        self._weighed: dict[int, list[SubmeshPlan]] = {}
        self._priced: dict[tuple[int, bool], Priced] = {}

    def shard(self, submesh: int, partial_sums: bool) -> SubmeshPlan:
        """The plan of a submesh; raises StageMemoryError where nothing fits its devices.

        First what an isomorphic submesh was given. Then, where the stage's price is of that, the
        fastest without a limit; what keeps the limit; and of small stages what holds the least.
        """
        joint, context = self._placed.graphs[submesh], self._placed.contexts[submesh]
        limit, mesh = self._request.budget_bytes, context.tables.prices.mesh
        shard, setting = self._given(submesh)
        colored = self._colors.of(joint, self._marks(submesh), self._standing(submesh))
        parts = tuple(
            (p.kind, p.loop, p.round, len(p.equations))
            for p in self._placed.parts
            if p.submesh == submesh
        )
        key = colored.key, parts, mesh, str(context.cluster), setting.pins, partial_sums

        def roomy() -> Iterator[SubmeshPlan | None]:
            yield self._known_plan(submesh, colored, self._known.get(key, ()))
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
        # One that has no listings was taken over in order: what is like it is like the other too.
        if fit.best.listings:
            self._known.setdefault(key, []).append((colored, fit.best))
        return fit.best

    def _known_plan(
        self, submesh: int, colored: ColoredGraph, known: Sequence[tuple[ColoredGraph, SubmeshPlan]]
    ) -> SubmeshPlan | None:
        """The plan of an isomorphic submesh; weighed anew where its ops have another order."""
        matches = ((m, plan) for other, plan in known if (m := match(other, colored)) is not None)
        first: tuple[Match, SubmeshPlan] | None = None
        for matched, plan in matches:
            if matched.in_order:
                renamed = matched.plan(plan.sharding)
                return SubmeshPlan.of_costs(self._placed, submesh, renamed, plan.costs, {})
            first = first or (matched, plan)
        if first is None:
            return None
        matched, plan = first
        return SubmeshPlan.of(self._placed, submesh, matched.plan(plan.sharding))

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
        # The same sharding under another limit is weighed already.
        weighed = self._weighed.setdefault(submesh, [])
        for known in weighed:
            if known.sharding.shards_as(plan):
                return replace(known, sharding=plan)
        weighed.append(SubmeshPlan.of(self._placed, submesh, plan))
        return weighed[-1]

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


def programs_of(
    placed: PlacedStages, plans: Sequence[SubmeshPlan], setting: Setting
) -> StagePrograms:
    """The programs of stages whose submeshes are sharded so, in order, with what they were priced.

    Raises LoweringError where a part cannot be lowered.
    """
    listings = {n: listing for plan in plans for n, listing in plan.listings.items()}
    programs = lower_stages(placed, [plan.sharding for plan in plans], setting, listings)
    costs = dict[int, StageCost]()
    for k, plan in enumerate(plans):
        costs.update(zip(placed.stages_on(k), plan.costs, strict=True))
    return replace(programs, priced=tuple(costs[s] for s in range(len(costs))))
