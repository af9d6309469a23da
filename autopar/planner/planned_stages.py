"""The plan of stage programs, and stage programs of a plan that was made before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cluster.planned import cluster_of
from autopar.errors import BatchError, PlanMismatchError
from autopar.frontend.compat import jax_minor
from autopar.ir.graph import Graph
from autopar.ir.outcome import Outcome, Status
from autopar.ir.pipeline import PipelinePlan, PlannedStage
from autopar.ir.plan import RESULT, Argument, Plan, Prediction, Traffic
from autopar.ir.program import Feed, Fetch
from autopar.ir.record import Record
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.text import show_seconds
from autopar.ir.values import Role
from autopar.passes.base import Setting
from autopar.passes.layer.fixed import Fixed
from autopar.planner.compatibility import check_ends, check_plan, contents_of
from autopar.planner.request import Request
from autopar.planner.restored_stages import cuts_of, restore_stages
from autopar.planner.sliced_step import slice_at
from autopar.planner.source import Source
from autopar.planner.stage_programs import StagePrograms, staged
from autopar.planner.stage_search import FoundStages, search_stages
from autopar.planner.step_timing import Timing, timing_of
from autopar.rules import RuleBook


@dataclass(frozen=True)
class PlannedStages:
    """A step on one set of argument types as stage programs, with its plan.

    Other limits and pins start from `source` and `request`.
    """

    source: Source
    request: Request
    staged: StagePrograms
    timing: Timing
    plan: Plan

    @property
    def graph(self) -> Graph:
        """The graph of one microbatch."""
        return self.staged.sliced.batching.graph


def plan_stages(source: Source, request: Request, setting: Setting) -> PlannedStages | None:
    """The best stage programs for a request, as a plan; None where one program is better.

    Raises what `search_stages` raises.
    """
    found = search_stages(source, request, setting)
    if found is None:
        return None
    return PlannedStages(source, request, found.staged, found.timing, _plan(found, request))


def stages_before(plan: Plan, source: Source, rules: RuleBook) -> PlannedStages:
    """The stage programs of a plan that was made before; nothing is searched.

    Raises PlanMismatchError, naming what differs, where the plan is for another step or JAX, and
    PlanFileError where it does not compute the step.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    with contents_of(plan):
        plan.check()
    try:
        trace = source.trace_at(pipeline.microbatches, cut=plan.stage_count > 1)
    except BatchError as error:
        raise PlanMismatchError(
            f"the plan for {plan.origin.step!a} cuts the step into {pipeline.microbatches} "
            f"microbatches, which cannot be: {error}"
        ) from error
    check_plan(plan, trace.whole)
    origin = plan.origin
    cluster = cluster_of(plan)
    request = Request(
        cluster, None, origin.method, origin.memory_bytes, origin.pins, rules=rules,
        stages=plan.stage_count, microbatches=pipeline.microbatches, schedule=pipeline.schedule,
    )  # fmt: skip
    setting = Setting(cluster, plan.mesh, origin.memory_bytes)
    with contents_of(plan):
        sliced = slice_at(trace, rules, setting, Fixed(cuts_of(pipeline)))
        laid = restore_stages(pipeline, sliced.batching, sliced.layers, cluster)
        for joint, sharding in zip(laid.joints(), pipeline.shardings, strict=True):
            sharding.verify(joint.graph)
        made = staged(sliced, laid.stages, laid.parts, pipeline.shardings, laid.grounds)
        check_ends(plan, tuple(_arguments(made)), tuple(_outputs(made)))
    timing = timing_of(laid.stages, made.costs, laid.blocks, cluster)
    return PlannedStages(source, request, made, timing, plan)


# -- the plan ----------------------------------------------------------------------------------


def _plan(found: FoundStages, request: Request) -> Plan:
    made, timing = found.staged, found.timing
    trace = made.sliced.trace
    pipeline = _pipeline(found)
    busiest = max(range(len(made.plans)), key=lambda k: timing.busy_seconds[k])
    traffic = tuple(_traffic(made, busiest))
    return Plan(
        origin=request.origin(trace.whole.name, trace.whole.key, jax_minor()),
        sharding=made.plans[0],
        arguments=tuple(_arguments(made)),
        outputs=tuple(_outputs(made)),
        prediction=Prediction(
            seconds=timing.seconds,
            communication_seconds=sum((t.seconds for t in traffic), 0.0),
            exposed_seconds=_exposed(made, busiest),
            traffic=traffic,
            argument_bytes=max(made.argument_bytes),
            peak_bytes=max(made.peak_bytes),
        ),
        layer_count=found.layer_count,
        stage_count=len(made.stages.stages),
        microbatches=made.stages.microbatches,
        pipeline=pipeline,
        record=Record.of(made.sliced.batching, request.rules.extra),
    )


def _pipeline(found: FoundStages) -> PipelinePlan:
    made, timing = found.staged, found.timing
    seconds = timing.seconds
    priced, examined = found.ranked.best.seconds, found.ranked.examined
    sentence = (
        f"The best of {examined} choices that were simulated; priced layer by layer it took "
        f"{show_seconds(priced)}."
    )
    outcome = Outcome(Status.FEASIBLE, seconds, min(seconds, timing.work_seconds), sentence)
    return PipelinePlan(
        schedule=made.stages.schedule,
        microbatches=made.stages.microbatches,
        batch=made.sliced.batching.batch,
        submeshes=made.stages.submeshes,
        stages=tuple(_stages(found)),
        shardings=made.plans,
        outcome=outcome,
        send_seconds=timing.simulation.times.send_seconds,
        launch_seconds=timing.launch_seconds,
        bubble_seconds=timing.bubble_seconds,
        peak_in_flight=timing.simulation.peak_in_flight,
        notes=made.sliced.batching.notes,
    )


def _stages(found: FoundStages) -> Iterator[PlannedStage]:
    made = found.staged
    layers = made.stages.layers.layers
    for number, (stage, costs) in enumerate(zip(made.stages.stages, made.costs, strict=True)):
        yield PlannedStage(
            name=layers[stage.last].name,
            layers=found.layers_of[number],
            stop=layers[stage.last].last + 1,
            submesh=stage.submesh,
            recompute=stage.recompute,
            cuts=stage.cuts,
            forward_seconds=costs.forward.total,
            input_gradient_seconds=costs.input_gradient.total,
            weight_gradient_seconds=costs.weight_gradient.total,
            once_seconds=costs.once.total,
            activation_bytes=costs.activation_bytes,
            kept_bytes=costs.kept_bytes,
            peak_bytes=made.peak_bytes[stage.submesh],
        )


def _arguments(made: StagePrograms) -> Iterator[Argument]:
    """The step's arguments where they are at home; one that nobody reads is whole on the first."""
    homes: dict[int, Feed] = {}
    for feed in made.program.feeds:
        homes.setdefault(feed.input, feed)
    whole = {i.path: i.value for i in made.sliced.trace.whole.graph.inputs}
    for number, given in enumerate(made.sliced.batching.graph.inputs):
        home = homes.get(number)
        value = whole.get(given.path)
        if value is None:
            continue  # the number of the microbatch is no argument
        lies = home.sharding if home is not None else replicated(len(value.shape))
        submesh = home.submesh if home is not None else 0
        yield Argument(given.path, value.shape, value.dtype, given.role.value, lies, submesh)


def _outputs(made: StagePrograms) -> Iterator[Argument]:
    graph = made.sliced.trace.whole.graph
    fetches: dict[int, Fetch] = {f.output: f for f in made.program.fetches}
    returns = dict(graph.donated)
    for number, operand in enumerate(graph.outputs):
        value = graph.value(operand)
        path = graph.output_paths[number] if graph.output_paths else ""
        role = Role.STATE.value if number in returns else RESULT
        fetch = fetches.get(number)
        lies = fetch.sharding if fetch is not None else Sharding(((),) * len(value.shape))
        submesh = fetch.submesh if fetch is not None else 0
        yield Argument(path, value.shape, value.dtype, role, lies, submesh)


def _traffic(made: StagePrograms, submesh: int) -> Iterator[Traffic]:
    """Collectives of one submesh in a step, by kind and axes."""
    table: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for costs, stage in zip(made.costs, made.stages.stages, strict=True):
        for found, runs in costs.traffic if stage.submesh == submesh else ():
            key = (found.kind, found.axes)
            held = table.get(key, Traffic(found.kind, found.axes, 0, 0, 0.0))
            table[key] = replace(
                held,
                count=held.count + found.count * runs,
                nbytes=held.nbytes + found.nbytes * runs,
                seconds=held.seconds + found.seconds * runs,
            )
    yield from (table[key] for key in sorted(table))


def _exposed(made: StagePrograms, submesh: int) -> float:
    """Seconds of a step in which one submesh waits for its own collectives."""
    runs = made.stages.microbatches
    return sum(
        runs * (c.forward + c.input_gradient + c.weight_gradient).exposed + c.once.exposed
        for c, stage in zip(made.costs, made.stages.stages, strict=True)
        if stage.submesh == submesh
    )
