"""The bytes that a device of each submesh holds over a step, as the predicted peak has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cost.kernels import Sizes
from autopar.cost.memory import held_while
from autopar.inspecting.flow import Flow
from autopar.inspecting.loaded_plan import LoadedPlan
from autopar.ir.inspection import MemoryCurve, MemoryLevel
from autopar.ir.peak import HeldKind
from autopar.ir.plan import Plan, PlannedStage
from autopar.ir.program import Part
from autopar.ir.sharding import replicated
from autopar.ir.values import Role
from autopar.planner.placed_stages import PlacedStages
from autopar.schedule.planned import simulation_of
from autopar.schedule.simulate import Span
from autopar.schedule.task import Kind

_MOST = 200


def memory_curves(loaded: LoadedPlan, flows: Sequence[Flow]) -> tuple[MemoryCurve, ...]:
    """The curve of each submesh; the highest level of all is the plan's predicted peak."""
    limit = loaded.plan.origin.memory_bytes
    if loaded.plan.is_one_program:
        return (MemoryCurve(0, _thinned(list(_levels(flows[0]))), limit),)
    levels = stage_levels(loaded.plan, loaded.placed, flows)
    return tuple(MemoryCurve(k, _thinned(held), limit) for k, held in enumerate(levels))


def _levels(flow: Flow) -> Iterator[MemoryLevel]:
    """Levels of one program: kernels in the order in which memory is counted.

    Each takes its work and what is waited for of its collectives; a loop's trips are one.
    """
    listed, timed = flow.listed, flow.timed
    spent = {kernel.makes[0]: s.total for _, kernel, s in timed.spent() if kernel.makes}
    mesh, platform = listed.prices.mesh, listed.prices.cluster.chip.platform
    held = list(held_while(listed.graph, listed.program, mesh, platform))
    taken = [spent.get(h.kernel.makes[0], 0.0) if h.kernel.makes else 0.0 for h in held]
    scale, now = timed.seconds.total / (sum(taken) or 1.0), 0.0
    for h, seconds in zip(held, taken, strict=True):
        step = h.block.instructions[h.kernel.at] if h.kernel.at >= 0 else None
        yield level_of(now * scale, flow.label(step), h.by_kind)
        now += seconds


def _thinned(levels: list[MemoryLevel]) -> tuple[MemoryLevel, ...]:
    """The highest and the lowest of each short time, where there are many."""
    if len(levels) <= _MOST:
        return tuple(levels)
    bins = _MOST // 2
    whole = levels[-1].seconds or 1.0
    kept: dict[int, list[MemoryLevel]] = {}
    for level in levels:
        found = kept.setdefault(min(bins - 1, int(level.seconds / whole * bins)), [level, level])
        if level.nbytes > found[0].nbytes:
            found[0] = level
        if level.nbytes < found[1].nbytes:
            found[1] = level
    pairs = (sorted(found, key=lambda level: level.seconds) for found in kept.values())
    return tuple(dict.fromkeys(level for pair in pairs for level in pair))


# -- stages under a schedule -----------------------------------------------------------------------

_AT_END = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def level_of(seconds: float, label: str, held: Counter[HeldKind]) -> MemoryLevel:
    """A level with its kinds in their order."""
    return MemoryLevel(seconds, label, tuple((kind, held[kind]) for kind in HeldKind if held[kind]))


def stage_levels(
    plan: Plan, placed: PlacedStages, flows: Sequence[Flow]
) -> Iterator[list[MemoryLevel]]:
    """By submesh, a level for each of its tasks and one for what it does once a step.

    What is in flight is held beside what is always held and the most that a part needs to work.
    """
    simulation = simulation_of(plan)
    for k, flight in enumerate(placed.in_flight):
        mine = [s for s in plan.stages if s.submesh == k]
        counted = flight * sum(s.activation_bytes for s in mine)
        always = _always(
            [(p, f) for p, f in zip(placed.parts, flows, strict=True) if p.submesh == k]
        )
        # What is set up once for all microbatches, and what the busiest part holds at work.
        always[HeldKind.TEMPORARY] = mine[0].peak_bytes - counted - always.total()
        yield list(_in_flight(simulation.spans[k], plan.stages, always, counted))


def _in_flight(
    spans: Sequence[Span], stages: Sequence[PlannedStage], always: Counter[HeldKind], counted: int
) -> Iterator[MemoryLevel]:
    """The levels of a submesh; at most, so much is in flight as the plan has `counted`."""
    # F adds the activations of its stage, B or W gives them back: the most is what was counted.
    held, now = list[int](), 0
    for span in spans:
        nbytes = stages[span.task.stage].activation_bytes
        now += nbytes if span.task.kind is Kind.FORWARD else 0
        held.append(now)
        now -= nbytes if span.task.kind in _AT_END else 0
    most = max(1, *held)
    for span, nbytes in zip(spans, held, strict=True):
        activations = Counter({HeldKind.ACTIVATION: nbytes * counted // most})
        yield level_of(span.start_seconds, str(span.task), always + activations)
    yield level_of(spans[-1].end_seconds, "update", always)


def _always(parts: Sequence[tuple[Part, Flow]]) -> Counter[HeldKind]:
    """Bytes of arguments and of sums over microbatches on a device of a submesh, by kind."""
    trained = {path for _, flow in parts for path in flow.read_before_update}
    found: dict[str, tuple[HeldKind, int]] = {}
    for part, flow in parts:
        listed = flow.listed
        sizes, sharding_of = Sizes(listed.graph, listed.sharding.mesh), listed.sharding.sharding_of
        given = sizes.inputs(listed.program)
        for i in listed.graph.inputs:
            if i.path and i.role is not Role.BATCH:
                kind = HeldKind.PARAMETER if i.path in trained else HeldKind.OPTIMIZER
                kind = kind if i.role is Role.STATE else HeldKind.CONSTANT
                found[i.path] = kind, given[i.value.name]
        for a in part.accumulators:
            value = listed.graph.values[a.value]
            sharding = sharding_of.get(a.value, replicated(len(value.shape)))
            nbytes = sizes.of(replace(value, dtype=a.dtype or value.dtype), sharding)
            found[a.value] = HeldKind.GRADIENT, nbytes
    totals = Counter[HeldKind]()
    for kind, nbytes in found.values():
        totals[kind] += nbytes
    return totals
