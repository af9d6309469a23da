"""The programs of a step's stages, one or many: sharded and lowered, with what each takes.

The parts of a stage cost what they do as they are lowered under its sharding. A step takes what the
simulated schedule of its stages does, and then what each submesh does once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.placement import link_between
from autopar.cost.memory import held_bytes
from autopar.cost.prices import Prices, issue_seconds
from autopar.cost.sizes import Sizes
from autopar.cost.stage import StageCost, peak_bytes, stage_times
from autopar.cost.timeline import Seconds, Timed, moved_seconds, timed_listing
from autopar.ir.batching import Accumulator
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing, Traffic, traffic_of
from autopar.ir.program import Part, PartKind, Program, SubmeshGraph
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd_program import NONE, SpmdProgram
from autopar.ir.values import Role, Value, item_bytes
from autopar.passes.base import Setting
from autopar.passes.lower.lowering import AbstractLowering, LoweredStages, Mpmd, Spmd
from autopar.passes.lower.program import lower_pipeline
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.planner.placed_stages import PlacedStages
from autopar.schedule.planned import simulate_loop
from autopar.schedule.simulate import Simulation

_NONE = Seconds()
_INWARD = (PartKind.BACKWARD, PartKind.INPUT_GRADIENT)


def cost_stage(
    placed: PlacedStages,
    stage: int,
    sharding: ShardingPlan,
    listings: Sequence[Listing],
) -> StageCost:
    """Seconds and bytes of a stage where its submesh is sharded so.

    `listings` are those of its parts under that sharding, in order.
    """
    submesh = placed.stages.stages[stage].submesh
    own = placed.parts_of(stage)
    joint, tables = placed.graphs[submesh], placed.contexts[submesh].tables
    if own and own[0].kind is PartKind.WHOLE:
        return WholeStep(own[0].graph, listings[0], tables.prices).cost
    costs = [
        (part, cost_part(part, sharding, tables, listing))
        for part, listing in zip(own, listings, strict=True)
    ]
    others = [p for p in placed.parts if p.submesh == submesh and p.stage != stage]
    return add_parts(costs, joint, sharding, placed.stages.microbatches, others)


@dataclass(frozen=True)
class WholeStep:
    """A step that is one program. Its time is known before its memory is, which takes as long."""

    graph: Graph
    listing: Listing
    prices: Prices

    @cached_property
    def sizes(self) -> Sizes:
        """Its blocks as they were read, and the bytes of its pieces."""
        return Sizes(self.graph, self.prices.mesh, self.prices.platform)

    @cached_property
    def timed(self) -> Timed:
        """The step in time."""
        return timed_listing(self.graph, self.listing, self.prices, self.sizes)

    @cached_property
    def cost(self) -> StageCost:
        """Its seconds and bytes."""
        held = held_bytes(self.graph, self.listing, self.sizes, self.timed)
        return StageCost.of_whole_step(self.listing, held, self.timed)


@dataclass(frozen=True)
class PartCost:
    """Seconds of one run of a part, the most that it holds beside its arguments, and its traffic.

    A part that is not run holds and takes nothing.
    """

    seconds: Seconds = _NONE
    working_bytes: int = 0
    traffic: tuple[Traffic, ...] = ()


def cost_part(part: Part, plan: ShardingPlan, tables: ReshardCosts, listing: Listing) -> PartCost:
    """The cost of a part where its submesh is sharded by `plan`."""
    platform = tables.prices.platform
    sizes = Sizes(part.graph, plan.mesh, platform)
    run = timed_listing(part.graph, listing, tables.prices, sizes, part.accumulators)
    held = held_bytes(part.graph, listing, sizes, run, part.accumulators)
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
        traffic += [(t, runs if part.is_looped else 1) for t in cost.traffic]
        if part.is_looped:
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
        once=sum((spent[k] for k in PartKind if k.runs_once), Seconds()),
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
        later = (p for p in parts if not p.is_looped and (p.loop, p.round) > when)
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


@dataclass(frozen=True)
class StepTiming:
    """A step in time. One that is one program has no schedule to simulate: it runs once.

    A host runs ahead of its devices, from one step into the next. So a step takes as long as the
    devices work, or as the busiest host takes to issue all that it has to, if that is more.
    """

    simulation: Simulation | None
    once_seconds: tuple[float, ...]  # by submesh
    launch_seconds: float  # what starting a part takes
    tick_seconds: float | None = None  # of all ticks, where stages are one program
    flying: tuple[int, ...] = ()  # microbatches in flight, where stages are one program
    issue_seconds: float = 0.0  # of the busiest host

    @property
    def seconds(self) -> float:
        """From one step to the next."""
        return max(self.device_seconds, self.issue_seconds)

    @property
    def order(self) -> tuple[float, float]:
        """The key that sorts plans, the fastest first: where hosts set the pace, devices too."""
        return self.seconds, self.device_seconds

    @property
    def device_seconds(self) -> float:
        """Until the last submesh has updated its state."""
        if self.tick_seconds is not None:  # nobody goes on before all are done
            return self.tick_seconds + max(self.once_seconds)
        loops = self.simulation.spans if self.simulation is not None else ()
        ends = [spans[-1].end_seconds for spans in loops] or [0.0]
        return max(end + once for end, once in zip(ends, self.once_seconds, strict=True))

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each submesh works."""
        loops = self.simulation.busy_seconds if self.simulation is not None else (0.0,)
        return tuple(work + once for work, once in zip(loops, self.once_seconds, strict=True))

    @property
    def work_seconds(self) -> float:
        """Seconds that the busiest submesh, or host, works: these stages take no less.

        One program launches less than its parts would, which is counted with their work.
        """
        return min(self.seconds, max(*self.busy_seconds, self.issue_seconds))

    @property
    def bubble_seconds(self) -> float:
        """Seconds that the idlest submesh waits."""
        return self.seconds - min(self.busy_seconds)

    @property
    def send_seconds(self) -> tuple[float, ...]:
        """Seconds that a transfer from each stage to the next takes."""
        return self.simulation.times.send_seconds if self.simulation is not None else ()

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches whose activations each submesh holds."""
        if self.flying:
            return self.flying
        return self.simulation.peak_in_flight if self.simulation is not None else (1,)


def time_spmd(timing: StepTiming, spmd: SpmdProgram) -> StepTiming:
    """The time of the same stages as one program: a tick takes as long as its slowest submesh.

    What is passed on at the end of a tick is waited for.
    """
    assert timing.simulation is not None
    times, launch = timing.simulation.times, timing.launch_seconds
    forward = [t - launch for t in times.forward]
    inward = [t - launch for t in times.input_gradient]
    backward = [a + b for a, b in zip(inward, times.weight_gradient, strict=True)]
    send = max(times.send_seconds, default=0.0)
    total = 0.0
    for loop in spmd.loops:
        first, second = loop.turns
        for a, b in zip(first.ticks, second.ticks, strict=True):
            busy = 0.0
            for s in range(len(a)):
                both = len(second.parts[s]) > 1
                seconds = (forward[s] if a[s] != NONE else 0.0) + (
                    backward[s] + forward[s] * both if b[s] != NONE else 0.0
                )
                busy = max(busy, seconds)
            total += busy + send * (any(lane for lane in first.lanes) and max(a) != NONE)
            total += send * (any(lane for lane in second.lanes) and max(b) != NONE)
    return replace(timing, tick_seconds=total, flying=spmd.peak_in_flight)


def time_step(placed: PlacedStages, costs: Sequence[StageCost]) -> StepTiming:
    """The step's time by the costs of its stages."""
    stages, contexts = placed.stages, placed.contexts
    count = len(contexts)
    once = [0.0] * count
    for stage, cost in zip(stages.stages, costs, strict=True):
        once[stage.submesh] += cost.once.total
    if stages.is_one_program:
        return StepTiming(None, tuple(once), 0.0)
    launch = placed.cluster.chip.launch_seconds
    layers = stages.layers.layers
    sends = tuple(
        link_between(placed.cluster, contexts[a.submesh].block, contexts[b.submesh].block).seconds(
            layers[a.last].cut_bytes
        )
        if a.submesh != b.submesh
        else 0.0
        for a, b in zip(stages.stages[:-1], stages.stages[1:], strict=True)
    )
    times = stage_times(costs, sends)
    loop = simulate_loop(stages.schedule, count, stages.microbatches, times, launch)
    return StepTiming(loop, tuple(once), launch)


@dataclass(frozen=True)
class StagePrograms:
    """A step as the programs of its stages.

    `priced` are the costs of the stages where they are known already. Where stages are one
    program, `spmd` is that, and the devices run it in place of the instructions of `program`.
    """

    placed: PlacedStages
    shardings: tuple[ShardingPlan, ...]  # by submesh
    program: Program
    priced: tuple[StageCost, ...] = ()
    spmd: SpmdProgram | None = None

    @property
    def graph(self) -> Graph:
        """The step's graph, of one microbatch where it is cut into some."""
        return self.placed.batching.graph

    @cached_property
    def whole(self) -> WholeStep | None:
        """The step where it is one program that is not priced yet."""
        if self.priced or not self.placed.stages.is_one_program:
            return None
        (made,), (context,) = self.program.parts, self.placed.contexts
        return WholeStep(made.part.graph, made.listing, context.tables.prices)

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Seconds and bytes of each stage."""
        if self.priced:
            return self.priced
        if self.whole is not None:
            return (self.whole.cost,)
        made = self.program.parts
        return tuple(
            cost_stage(
                self.placed, s, self.shardings[stage.submesh],
                [p.listing for p in made if p.part.stage == s],
            )
            for s, stage in enumerate(self.placed.stages.stages)
        )  # fmt: skip

    @property
    def lowered(self) -> Program | SpmdProgram:
        """The list of instructions, or the one program, that the devices run."""
        return self.spmd or self.program

    @property
    def lowering(self) -> str:
        """The name of how the stages are lowered; one stage is one program anyway."""
        return Spmd.name if self.spmd or self.program.is_one_part else Mpmd.name

    @cached_property
    def timing(self) -> StepTiming:
        """The stages in time."""
        if self.whole is not None:
            return StepTiming(None, (self.whole.timed.seconds.total,), 0.0)
        return self.timed(self.costs)

    def timed(self, costs: Sequence[StageCost]) -> StepTiming:
        """The stages in time if they cost this."""
        timing = time_step(self.placed, costs)
        if self.placed.stages.is_one_program:
            return timing
        blocks = [c.block.start for c in self.placed.contexts]
        issued = issue_seconds(self.lowered, blocks, self.placed.cluster)
        timing = replace(timing, issue_seconds=issued)
        return time_spmd(timing, self.spmd) if self.spmd is not None else timing

    def lowered_by(self, lowering: AbstractLowering, setting: Setting) -> StagePrograms:
        """The same stages as a pass lowers them. Raises LoweringError where it cannot."""
        if self.program.is_one_part:
            return self

        def lowered_to(lowered: Program | SpmdProgram) -> StagePrograms:
            if lowered is self.lowered:  # whose time may be known
                return self
            return replace(self, spmd=lowered if isinstance(lowered, SpmdProgram) else None)

        given = LoweredStages(
            self.program,
            self.placed.contexts[0].resharder,
            self.placed.cluster.chip.platform,
            lambda lowered: lowered_to(lowered).timing.seconds,
            lambda spmd: max(lowered_to(spmd).peak_bytes),
        )
        return lowered_to(lowering.run(given, setting))

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes that one device of each submesh holds."""
        if self.spmd is not None:  # all devices have room for the same
            held = self.spmd.state_bytes + self.spmd.sum_bytes
            working = max(c.working_bytes for c in self.costs)
            update = max(c.once_bytes for c in self.costs)
            flying = self.spmd.ring_bytes + self.spmd.lane_bytes
            peak = held + max(flying + working, update)
            return (peak,) * len(self.shardings)
        return tuple(
            peak_bytes([self.costs[s] for s in self.placed.stages_on(k)], flight)
            for k, flight in enumerate(self.placed.in_flight)
        )

    @property
    def argument_bytes(self) -> tuple[int, ...]:
        """Bytes that one device of each submesh holds throughout."""
        return tuple(
            sum(self.costs[s].fixed_bytes for s in self.placed.stages_on(k))
            for k in range(len(self.shardings))
        )

    def seconds(self, submesh: int) -> Seconds:
        """Work and collectives of one submesh in a step."""
        if self.whole is not None:
            return self.whole.timed.seconds
        runs = self.placed.stages.microbatches
        own = (self.costs[s] for s in self.placed.stages_on(submesh))
        return sum((c.of_step(runs) for c in own), Seconds())


def lower_stages(
    placed: PlacedStages,
    shardings: Sequence[ShardingPlan],
    setting: Setting,
    known: Mapping[int, Listing] | None = None,
) -> StagePrograms:
    """Lowers every part of stages that were sharded, now or before, to a list of instructions.

    With that the lower slot begins; `StagePrograms.lowered_by` may make one program of the list.

    Parts whose listing is `known`, by number, are only checked. Raises GraphError where the
    program would compute something else than the step.
    """
    program = setting.watched("lower", shardings, lambda: _lower(placed, shardings, known or {}))
    return StagePrograms(placed, tuple(shardings), program)


def _lower(
    placed: PlacedStages, shardings: Sequence[ShardingPlan], known: Mapping[int, Listing]
) -> Program:
    listings: list[Listing] = []
    for n, part in enumerate(placed.parts):
        sharding = shardings[part.submesh]
        listings.append(known[n] if n in known else placed.lowered(part, sharding))
        placed.by_mesh[sharding.mesh].checker.check(part.graph, listings[n])
    if placed.stages.is_one_program:
        (submesh,), (listing,) = placed.stages.submeshes, listings
        return Program.of_one_part(placed.batching.graph, listing, submesh)
    return lower_pipeline(placed.dataflow, listings)
