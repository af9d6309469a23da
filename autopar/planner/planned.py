"""A planned step: the plan with what it predicts, and the programs that run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.frontend.compat import jax_minor
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.graph import Graph, Op
from autopar.ir.listing import Traffic, kind_order
from autopar.ir.plan import (
    RESULT,
    Argument,
    Plan,
    PlannedStage,
    PlannedSubmesh,
    Prediction,
)
from autopar.ir.program import Feed, Fetch, Program
from autopar.ir.record import Record
from autopar.ir.sharding import replicated
from autopar.ir.sharding_plan import Outcome, Recomputation
from autopar.ir.values import Role
from autopar.passes.lower.compiler_options import choose_options
from autopar.planner.memory_fit import MeshContext
from autopar.planner.request import Request
from autopar.planner.sliced_step import Source
from autopar.planner.stage_programs import StagePrograms
from autopar.rules import HEAVY


@dataclass(frozen=True)
class Planned:
    """A step planned for one set of argument types, with the programs that run it.

    The `trace` is the step as it runs, whole and on one microbatch. Other limits and pins start
    from the `source` and the `request`; the `context` has what was priced on the mesh of a step
    that is one program.
    """

    source: Source
    request: Request
    trace: MicrobatchTrace
    plan: Plan
    programs: StagePrograms
    context: MeshContext | None = None

    @property
    def graph(self) -> Graph:
        """The graph of the step as it runs, of one microbatch where it is cut into some."""
        return self.programs.graph

    @property
    def program(self) -> Program:
        """The instructions that the devices run."""
        return self.programs.program


def make_plan(
    source: Source,
    request: Request,
    trace: MicrobatchTrace,
    programs: StagePrograms,
    outcome: Outcome,
    layers_of: Sequence[int],
    recomputation: Recomputation = Recomputation(),
) -> Plan:
    """The plan that stage programs are: what was decided, and what it should take.

    `layers_of` says how many layers each stage has.
    """
    stages, batching = programs.placed.stages, programs.placed.batching
    return Plan(
        origin=request.origin(source.traced.name, source.traced.key, jax_minor()),
        submeshes=tuple(
            PlannedSubmesh(submesh.devices, sharding)
            for submesh, sharding in zip(stages.submeshes, programs.shardings, strict=True)
        ),
        stages=tuple(_stages(programs, layers_of)),
        arguments=tuple(list_arguments(trace, programs)),
        outputs=tuple(list_outputs(trace, programs)),
        prediction=_prediction(programs, source.plain.graph),
        outcome=outcome,
        schedule=stages.schedule,
        lowering=programs.lowering,
        microbatches=stages.microbatches,
        batch=batching.batch,
        recomputation=recomputation,
        notes=batching.notes,
        compiler_options=choose_options(
            programs.program.parts,
            programs.placed.cluster.chip.platform,
            request.compiler_options,
            frozenset[str]().union(*(costs.pipelined for costs in programs.costs)),
            all(costs.merges for costs in programs.costs),
        ),
        record=Record.of(batching, request.rules.extra),
    )


def _prediction(programs: StagePrograms, whole: Graph) -> Prediction:
    """Collectives are those of the submesh that works longest, bytes those of the fullest."""
    cluster = programs.placed.cluster
    flops, dtype = model_flops(whole)
    timing = programs.timing
    busy = timing.busy_seconds
    busiest = max(range(len(busy)), key=lambda k: busy[k])
    seconds = programs.seconds(busiest)
    return Prediction(
        seconds=timing.seconds,
        communication_seconds=seconds.communication,
        exposed_seconds=seconds.exposed,
        traffic=tuple(_traffic(programs, busiest)),
        argument_bytes=max(programs.argument_bytes),
        peak_bytes=max(programs.peak_bytes),
        peak=programs.costs[0].peak,
        send_seconds=timing.send_seconds,
        launch_seconds=timing.launch_seconds,
        bubble_seconds=timing.bubble_seconds,
        peak_in_flight=timing.peak_in_flight,
        model_flops=float(flops),
        peak_flops=cluster.device_count * cluster.chip.flops_for(dtype),
        arithmetic_seconds=seconds.arithmetic,
        memory_seconds=max(0.0, seconds.compute - seconds.arithmetic),
    )


def _stages(programs: StagePrograms, layers_of: Sequence[int]) -> Iterator[PlannedStage]:
    stages = programs.placed.stages
    layers, peaks = stages.layers.layers, programs.peak_bytes
    for count, stage, costs in zip(layers_of, stages.stages, programs.costs, strict=True):
        yield PlannedStage(
            name=layers[stage.last].name if layers else "",
            layers=count,
            stop=layers[stage.last].last + 1 if layers else 0,
            submesh=stage.submesh,
            remat=stage.remat,
            cuts=stage.cuts,
            forward_seconds=costs.forward.total,
            input_gradient_seconds=costs.input_gradient.total,
            weight_gradient_seconds=costs.weight_gradient.total,
            once_seconds=costs.once.total,
            activation_bytes=costs.activation_bytes,
            kept_bytes=costs.kept_bytes,
            peak_bytes=peaks[stage.submesh],
        )


def list_arguments(trace: MicrobatchTrace, programs: StagePrograms) -> Iterator[Argument]:
    """The step's arguments where they are at home; one that nobody reads is whole on the first."""
    homes: dict[int, Feed] = {}
    for feed in programs.program.feeds:
        homes.setdefault(feed.input, feed)
    whole = {i.path: i.value for i in trace.whole.graph.inputs}
    for number, given in enumerate(programs.graph.inputs):
        home = homes.get(number)
        value = whole.get(given.path)
        if value is None:
            continue  # the number of the microbatch is no argument
        lies = home.sharding if home is not None else replicated(len(value.shape))
        submesh = home.submesh if home is not None else 0
        yield Argument(given.path, value.shape, value.dtype, given.role.value, lies, submesh)


def list_outputs(trace: MicrobatchTrace, programs: StagePrograms) -> Iterator[Argument]:
    """The step's outputs; state is named by the input that it becomes."""
    graph = trace.whole.graph
    fetches: dict[int, Fetch] = {f.output: f for f in programs.program.fetches}
    returns = dict(graph.donated)
    for number, operand in enumerate(graph.outputs):
        value = graph.value(operand)
        path = graph.output_paths[number] if graph.output_paths else ""
        role = Role.STATE.value if number in returns else RESULT
        fetch = fetches.get(number)
        lies = fetch.sharding if fetch is not None else replicated(len(value.shape))
        submesh = fetch.submesh if fetch is not None else 0
        yield Argument(path, value.shape, value.dtype, role, lies, submesh)


def _traffic(programs: StagePrograms, submesh: int) -> Iterator[Traffic]:
    """Collectives of one submesh in a step, by kind and axes."""
    table: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for s in programs.placed.stages_on(submesh):
        for found, runs in programs.costs[s].traffic:
            key = (found.kind, found.axes)
            known = table.get(key, Traffic(found.kind, found.axes, 0, 0, 0.0))
            table[key] = replace(
                known,
                count=known.count + found.count * runs,
                nbytes=known.nbytes + found.nbytes * runs,
                seconds=known.seconds + found.seconds * runs,
            )
    yield from (table[key] for key in sorted(table, key=kind_order))


# -- model FLOPs -----------------------------------------------------------------------------------
#
# The products that a step cannot do without, by which model FLOPs utilization is measured
# (Chowdhery et al., "PaLM", appendix B):
#
#     forward   y = x w                2 b k n
#     backward  dx = dy w', dw = x' dy 4 b k n
#     remat     y = x w once more      not counted: the forward pass has it


def model_flops(graph: Graph) -> tuple[int, str]:
    """The FLOPs of a step's products on all rows, and the dtype that most of them are in."""
    products = list(_products(graph, 1))
    forward = {_key(op) for op, _ in products if op.origin.region == "forward"}
    by_dtype = Counter[str]()
    for op, runs in products:
        # A product of the backward pass that is one of the forward pass is a recomputation.
        if op.origin.region != "backward" or _key(op) not in forward:
            by_dtype[op.results[0].dtype] += op.flops * runs
    (dtype, _), *_ = by_dtype.most_common(1) or [("f32", 0)]
    return by_dtype.total(), dtype


def _products(graph: Graph, runs: int) -> Iterator[tuple[Op, int]]:
    """The products, those of bodies too, with how often a step runs them."""
    for op in graph.ops:
        often = runs * op.runs
        flow = op.control_flow
        if flow is None and op.kind in HEAVY:
            yield op, often
        elif flow is not None:
            trips = max(1, flow.trips) if flow.kind == "scan" else 1
            for body in op.graphs:
                yield from _products(body, often * trips)


def _key(op: Op) -> tuple[object, ...]:
    types = tuple((v.shape, v.dtype) for v in op.results)
    return op.kind, op.params, op.origin.line, types, op.flops
