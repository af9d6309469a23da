"""The cost of a stage's parts, as they are lowered under a sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.cost.kernels import Sizes
from autopar.cost.listing import Seconds
from autopar.cost.memory import AsPart, held_bytes
from autopar.cost.overlap import moved_seconds, timed_listing
from autopar.cost.stage import StageCost
from autopar.ir.batching import Accumulator
from autopar.ir.program import Part, PartKind, SubmeshGraph
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import SpmdProgram, Traffic, traffic_of
from autopar.ir.values import Role, Value, item_bytes
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan
from autopar.passes.lower.spmd import lower_spmd
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.planner.placed_stages import PlacedStages

_ONCE = (PartKind.WHOLE, PartKind.HOIST, PartKind.SETUP, PartKind.UPDATE)
_NONE = Seconds()
_INWARD = (PartKind.BACKWARD, PartKind.INPUT_GRADIENT)


def cost_stage(
    placed: PlacedStages,
    stage: int,
    sharding: ShardingPlan,
    listings: Sequence[SpmdProgram] | None = None,
) -> StageCost:
    """Seconds and bytes of a stage where its submesh is sharded so.

    `listings` are those of its parts, in order, where they were lowered already.
    """
    submesh = placed.stages.stages[stage].submesh
    own = placed.parts_of(stage)
    joint, tables = placed.graphs[submesh], placed.contexts[submesh].tables
    if own[0].kind is PartKind.WHOLE:
        (graph,), prices = (part.graph for part in own), tables.prices
        (listing,) = listings or (lower_spmd(graph, sharding, tables.resharder),)
        held = held_bytes(graph, listing, sharding.mesh, prices.cluster.chip.platform)
        return StageCost.of_whole_step(listing, held, timed_listing(graph, listing, prices))
    costs = [
        (part, cost_part(part, joint, sharding, tables, listings[i] if listings else None))
        for i, part in enumerate(own)
    ]
    others = [p for p in placed.parts if p.submesh == submesh and p.stage != stage]
    return add_parts(costs, joint, sharding, placed.stages.microbatches, others)


@dataclass(frozen=True)
class PartCost:
    """Seconds of one run of a part, the most that it holds beside its arguments, and its traffic.

    A part that is not run holds and takes nothing.
    """

    seconds: Seconds = _NONE
    working_bytes: int = 0
    traffic: tuple[Traffic, ...] = ()


def cost_part(
    part: Part,
    joint: SubmeshGraph,
    plan: ShardingPlan,
    tables: ReshardCosts,
    listing: SpmdProgram | None = None,
) -> PartCost:
    """The cost of a part where its submesh is sharded by `plan`."""
    if listing is None:
        own, loose = part_plan(part, joint, plan), left_partial(part, joint)
        listing = lower_spmd(part.graph, own, tables.resharder, loose)
    platform = tables.prices.cluster.chip.platform
    sizes = Sizes(part.graph, plan.mesh, platform)
    run = timed_listing(part.graph, listing, tables.prices, sizes)
    as_part = AsPart(part.accumulators, run)
    held = held_bytes(part.graph, listing, plan.mesh, platform, sizes, as_part)
    working = held.peak_bytes - held.argument_bytes
    return PartCost(run.seconds, working, tuple(traffic_of(listing, moved_seconds(run))))


def add_parts(
    costs: Sequence[tuple[Part, PartCost]],
    joint: SubmeshGraph,
    plan: ShardingPlan,
    runs: int,
    others: Sequence[Part] = (),
) -> StageCost:
    """The cost of one stage by those of its parts, of which a step runs the loop's `runs` times.

    `others` are the parts of the submesh's other stages. What several stages touch is held once:
    for the first of them.
    """
    parts, spent = [part for part, _ in costs], {kind: Seconds() for kind in PartKind}
    working, once, traffic = 0, 0, list[tuple[Traffic, int]]()
    weigh = _Scale(joint, plan)
    stage = parts[0].stage if parts else 0
    own = _touched(parts) - _touched(p for p in others if p.stage < stage)
    stashed = set(joint.stashed) & own
    for part, cost in costs:
        spent[part.kind] += cost.seconds
        traffic += [(t, 1 if part.kind in _ONCE else runs) for t in cost.traffic]
        if part.kind not in _ONCE:
            # What F keeps is counted with the microbatches in flight, of which its own is one.
            # What a part is given and nobody counts, such as a gradient that was sent, is there.
            given = {i.value.name for i in part.graph.inputs}
            passing = given - weigh.lasting((*parts, *others)) - set(joint.stashed)
            keeps = set(map(str, part.graph.outputs)) & stashed - given
            flying = weigh.of(keeps) if part.kind is PartKind.FORWARD else 0
            working = max(working, cost.working_bytes + weigh.of(passing) - flying)
        else:
            # What is set up lasts: it is among what is held throughout.
            results = set(map(str, part.graph.outputs)) & set(joint.graph.nested_values)
            lasting = weigh.of(results) if part.kind is PartKind.SETUP else 0
            taken = weigh.taken(part, (*parts, *others))
            once = max(once, cost.working_bytes - lasting - taken)
    late = [p for p in parts if p.kind is PartKind.WEIGHT_GRADIENT]
    kept = {given.value.name for p in late for given in p.graph.inputs}
    made = {str(o) for p in parts if p.kind is PartKind.INPUT_GRADIENT for o in p.graph.outputs}
    return StageCost(
        forward=spent[PartKind.FORWARD],
        input_gradient=sum((spent[k] for k in _INWARD), Seconds()),
        weight_gradient=spent[PartKind.WEIGHT_GRADIENT],
        once=sum((spent[k] for k in _ONCE), Seconds()),
        fixed_bytes=weigh.fixed(parts, own),
        activation_bytes=weigh.of(stashed),
        kept_bytes=weigh.of(stashed & kept),
        working_bytes=working,
        late_bytes=weigh.of(stashed & kept & made),
        once_bytes=once,
        traffic=tuple(traffic),
    )


def _touched(parts: Iterable[Part]) -> frozenset[str]:
    """The values that parts are given or give."""
    graphs = [part.graph for part in parts]
    given = {i.value.name for graph in graphs for i in graph.inputs}
    return frozenset(given | {str(o) for graph in graphs for o in graph.outputs})


class _Scale:
    """Weighs values of a joint graph on one device."""

    def __init__(self, joint: SubmeshGraph, plan: ShardingPlan) -> None:
        self._joint, self._plan = joint, plan
        self._values = joint.graph.nested_values

    def of(self, names: set[str]) -> int:
        """Bytes of some values' pieces."""
        return sum(self._piece(self._values[n], self._values[n].dtype) for n in sorted(names))

    def lasting(self, parts: Sequence[Part]) -> set[str]:
        """The values that are there throughout a step: state, constants, what is set up."""
        found = {
            i.value.name for i in self._joint.graph.inputs if i.role is not Role.BATCH and i.path
        }
        made = (p for p in parts if p.kind is PartKind.SETUP)
        found.update(o for p in made for o in p.graph.outputs if isinstance(o, str))
        return found

    def fixed(self, parts: Sequence[Part], own: frozenset[str]) -> int:
        """Bytes that are there throughout a step: lasting values, accumulators."""
        sums = {a.value: a for p in parts for a in p.accumulators}
        return self.of(self.lasting(parts) & own) + sum(
            self._sum(a) for _, a in sorted(sums.items())
        )

    def taken(self, part: Part, parts: Sequence[Part]) -> int:
        """Bytes of a part's outputs that are written over sums which no later part reads."""
        when = part.loop, part.round
        later = (p for p in parts if p.kind in _ONCE and (p.loop, p.round) > when)
        read = {i.value.name for p in later for i in p.graph.inputs} | self._joint.final
        given = {i.value.name for i in part.graph.inputs} - read
        sums = {a.value: a for p in parts for a in p.accumulators if a.value in given}
        room = Counter(
            (self._values[n].shape, a.dtype or self._values[n].dtype, self._lying(n))
            for n, a in sums.items()
        )
        nbytes = 0
        for name in filter(self._values.__contains__, map(str, part.graph.outputs)):
            value = self._values[name]
            kind = value.shape, value.dtype, self._lying(name)
            if room[kind] > 0:
                room[kind] -= 1
                nbytes += self._piece(value, value.dtype)
        return nbytes

    def _lying(self, name: str) -> Sharding | None:
        return self._plan.sharding_of.get(name)

    def _sum(self, accumulator: Accumulator) -> int:
        value = self._values[accumulator.value]
        return self._piece(value, accumulator.dtype or value.dtype)

    def _piece(self, value: Value, dtype: str) -> int:
        sharding = self._lying(value.name)
        count = value.item_count
        if sharding is not None:
            count = count // sharding.pieces(self._plan.mesh)
        return count * item_bytes(dtype)
