"""A companion: a function planned on the meshes of another step's plan, its state as it lies there.

    the other step's plan            the companion
      state/params/w  mesh0 P('x')     params/w is that leaf: pinned to P('x'), read on mesh0
      state/opt/mu/w  mesh0 P('x')     not given: its bytes are taken off the memory limit
      stages 0..n on mesh0..mesh_m     stages cut where the state lies, forward only

Nothing of the state is resharded or consumed, and nothing is searched but the shardings of the
companion's own values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import ArgumentError, BatchError, bulleted
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.batching import Batching
from autopar.ir.graph import Graph
from autopar.ir.plan import Argument, Plan, leaf_arguments
from autopar.ir.sharding_plan import Outcome, Status
from autopar.ir.stages import Stage, StagePlan
from autopar.passes.base import Setting, Watcher
from autopar.passes.layer.follow_state import FollowState
from autopar.passes.layer.forward_pass import forward_of
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.planned import Planned, make_plan
from autopar.planner.request import Request
from autopar.planner.sliced_step import Source, batched
from autopar.planner.submesh_sharding import SubmeshPlan, SubmeshSharder, programs_of
from autopar.schedule.table import stage_devices

_FORWARD_ONLY = "forward-only"


def plan_companion(source: Source, request: Request, watchers: Sequence[Watcher]) -> Planned:
    """Plans a companion of a plan that has several submeshes: the stages of that plan, in order.

    It runs in as many microbatches as the other step, or in one where its own batch cannot be cut
    so. Raises ArgumentError where no op of it reads a batch, MemoryLimitError where it does not fit
    beside the state that it is not given.
    """
    beside = request.beside
    assert beside is not None
    setting = request.setting(watchers, beside.mesh)
    # 1. Microbatches.
    trace, batching = _batched(source, request, setting, beside.microbatches)
    graph = batching.graph
    # 2. Stages: one for each of the other plan, cut where the state of that lies.
    shared = shared_state(trace.whole.graph, beside)
    on = tuple(stage.submesh for stage in beside.stages)
    layering = FollowState(tuple((path, a.submesh) for path, a in shared.items()), on)
    if len(forward_of(batching).positions) < len(on):
        raise ArgumentError(
            f"{graph.name} cannot follow the {len(on)} stages of {beside.origin.step}: fewer of "
            "its operations than that read a batch. What computes with the state alone runs leaf "
            "by leaf, as in jax.tree.map(jnp.sum, state)"
        )
    layers = replace(request.passes, layer=layering).cut_layers(batching, setting)
    is_forward = all(op.origin.region == "forward" for op in graph.ops)
    count = len(beside.submeshes)
    in_order = on == stage_devices(_FORWARD_ONLY, count, len(on) // count)
    stages = StagePlan(
        layers,
        tuple(Stage(i, i, submesh) for i, submesh in enumerate(on)),
        tuple(s.submesh for s in beside.submeshes),
        batching.microbatches,
        _FORWARD_ONLY if is_forward and in_order else beside.schedule,
    )
    # 3. The sharding of each submesh, with the state as it lies there.
    placed = PlacedStages.of(batching, stages, request.cluster, options=request.compiler_options)
    asked = request.of_parts() if len(on) > 1 else request
    plans: list[SubmeshPlan] = []
    for k, joint in enumerate(placed.graphs):
        own = request_on(asked, joint.graph, shared, k)
        plans.append(SubmeshSharder(placed, own, setting).shard(k, partial_sums=False))
    # 4. The programs, and what they take.
    programs = programs_of(placed, plans, setting)
    timing = programs.timing
    outcome = Outcome(
        Status.FEASIBLE,
        timing.seconds,
        timing.work_seconds,
        f"The stages of {beside.origin.step}, with its state as it lies.",
    )
    alone = replace(request, beside=None)
    plan = make_plan(source, alone, trace, programs, outcome, (1,) * len(on))
    return Planned(source, request, trace, plan, programs)


def _batched(
    source: Source, request: Request, setting: Setting, microbatches: int
) -> tuple[MicrobatchTrace, Batching]:
    """The step in so many microbatches, or whole where it cannot be cut into them exactly."""
    try:
        trace = source.trace_at(microbatches, cut=True)
        return batched(trace, request.rules, setting)
    except (ArgumentError, BatchError):
        return batched(source.trace_at(1, cut=True), request.rules, setting)


def request_on(
    request: Request, graph: Graph, shared: Mapping[str, Argument], submesh: int = 0
) -> Request:
    """The request for the graph of one submesh: what it reads of the state there is pinned.

    The rest of that state stays on the devices, and is taken off what they may hold.
    """
    beside = request.beside
    assert beside is not None
    mesh = beside.submeshes[submesh].mesh
    paths = [i.path for i in graph.inputs if i.path in shared]
    own = {path: shared[path] for path in paths if shared[path].submesh == submesh}
    read = {a.path for a in own.values()}
    left = sum(
        a.local_bytes(mesh) for a in beside.state if a.submesh == submesh and a.path not in read
    )
    pins = (*request.pins, *((path, a.sharding.dims) for path, a in own.items()))
    limit = max(1, request.budget_bytes - left)
    return replace(request, mesh=mesh, pins=pins, memory_bytes=limit, beside=None)


# -- which state ---------------------------------------------------------------------------------


def with_shared_state(source: Source, beside: Plan) -> Source:
    """The source with what it shares with another plan marked as state."""
    return source.with_state(shared_state(source.plain.graph, beside))


def shared_state(graph: Graph, beside: Plan) -> dict[str, Argument]:
    """The arguments of a graph, by path, that are state of another plan, as it lies there.

    Of the state is what has the type of a leaf, and its path or the end of it; the argument's own
    name may be another one:

        the other step   state/params/w   state/opt/mu/w
        the graph        state/params/w,  or params/w,  or model/params/w

    Raises ArgumentError where that is nothing, or leaves that lie otherwise have the same end.
    """
    state, shared = _state_of(beside), dict[str, Argument]()
    faults: list[str] = []
    for given in graph.inputs:
        alike = [a for a in state if (a.shape, a.dtype) == (given.value.shape, given.value.dtype)]
        for end in (given.path, given.path.partition("/")[2]):
            found = [a for a in alike if end and f"/{a.path}".endswith(f"/{end}")]
            if not found:
                continue
            if len({(a.submesh, a.sharding.dims) for a in found}) > 1:
                faults.append(f"{given.path} may be {' or '.join(a.path for a in found)}")
            shared[given.path] = found[0]
            break
    if faults:
        raise ArgumentError(
            bulleted(
                f"{graph.name} is to take the state as it lies, and it is not plain which part:",
                faults,
                "Call the argument as the path of that part ends, such as params, or pass the "
                "whole state.",
            )
        )
    if not shared:
        shown = ", ".join(a.path for a in state[:3])
        raise ArgumentError(
            f"{graph.name} is given nothing of the state of the step that it runs beside, which "
            f"has {shown}{', ...' if len(state) > 3 else ''}: parallelize it on its own"
        )
    return shared


def _state_of(plan: Plan) -> tuple[Argument, ...]:
    """The state of a plan; a stack that stages share is there in pieces, and whole as well."""
    stacks = (leaf for leaf in leaf_arguments(plan.state) if len(leaf.arguments) > 1)
    whole = (replace(s.arguments[0], path=s.path, shape=s.shape) for s in stacks)
    return (*plan.state, *whole)
