"""What a device of a submesh holds while its schedule takes microbatches through its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.cost.kernels import Sizes
from autopar.inspecting.flow import Flow
from autopar.ir.inspection import Level
from autopar.ir.peak import HeldKind
from autopar.ir.pipeline import PipelinePlan, PlannedStage
from autopar.ir.program import Part
from autopar.ir.sharding import replicated
from autopar.ir.values import Role
from autopar.planner.restored_stages import RestoredStages
from autopar.planner.submesh_sharding import peak_in_flight
from autopar.schedule.planned import simulation_of
from autopar.schedule.simulate import Span
from autopar.schedule.task import Kind

_AT_END = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def level_of(seconds: float, label: str, held: Counter[HeldKind]) -> Level:
    """A level with its kinds in their order."""
    return Level(seconds, label, tuple((kind, held[kind]) for kind in HeldKind if held[kind]))


def stage_levels(
    pipeline: PipelinePlan, laid: RestoredStages, flows: Sequence[Flow]
) -> Iterator[list[Level]]:
    """By submesh, a level for each of its tasks and one for what it does once a step.

    What is in flight is held beside what is always held and the most that a part needs to work.
    """
    simulation = simulation_of(pipeline)
    for k, flight in enumerate(peak_in_flight(laid.stages)):
        mine = [s for s in pipeline.stages if s.submesh == k]
        counted = flight * sum(s.activation_bytes for s in mine)
        always = _always([(p, f) for p, f in zip(laid.parts, flows, strict=True) if p.submesh == k])
        # What is set up once for all microbatches, and what the busiest part holds at work.
        always[HeldKind.TEMPORARY] = mine[0].peak_bytes - counted - always.total()
        yield list(_in_flight(simulation.spans[k], pipeline.stages, always, counted))


def _in_flight(
    spans: Sequence[Span], stages: Sequence[PlannedStage], always: Counter[HeldKind], counted: int
) -> Iterator[Level]:
    """The levels of a submesh; at most, so much is in flight as the plan has `counted`."""
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
        sizes, lies = Sizes(listed.graph, listed.sharding.mesh), listed.sharding.sharding_of
        given = sizes.inputs(listed.program)
        for i in listed.graph.inputs:
            if i.path and i.role is not Role.BATCH:
                kind = HeldKind.PARAMETER if i.path in trained else HeldKind.OPTIMIZER
                kind = kind if i.role is Role.STATE else HeldKind.CONSTANT
                found[i.path] = kind, given[i.value.name]
        for a in part.accumulators:
            value = listed.graph.values[a.value]
            sharding = lies.get(a.value, replicated(len(value.shape)))
            nbytes = sizes.of(value.shape, a.dtype or value.dtype, sharding)
            found[a.value] = HeldKind.GRADIENT, nbytes
    totals = Counter[HeldKind]()
    for kind, nbytes in found.values():
        totals[kind] += nbytes
    return totals
