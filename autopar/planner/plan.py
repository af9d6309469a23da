"""From a traced step to a plan: no device is touched.

    source, request             the step and its traces; what is asked for, and the passes for it
       |
       |  one program                              stages or microbatches
       |    1. each mesh sharded without a limit     1. slice into microbatches and layers
       |    2. where memory binds: shard more,       2. price each class of layers on each
       |       recompute, or take a recipe              submesh and mesh (stage_table)
       |       (memory_fit, remat)                   3. search stages, submeshes, schedule
       |    3. the fastest that fits, or a           4. shard each submesh within its memory
       |       faster one beside it (best_mesh)         (submesh_sharding)
       v                                             v
    StagePrograms               one part WHOLE on one submesh, or parts F B W on many
       |
    Planned                     the plan, and the programs that run it

`restore` comes from a saved plan to the same programs, and `replan` starts from a planned step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.cluster import mesh_shapes
from autopar.errors import (
    AutoparError,
    BatchError,
    ClusterError,
    InfeasibleError,
    MemoryLimitError,
)
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.graph import Graph
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import Outcome, Status
from autopar.ir.text import show_bytes, show_seconds
from autopar.passes.base import Pins, Watcher
from autopar.passes.shard.model.read import Readings
from autopar.planner.best_mesh import best_of, try_meshes
from autopar.planner.companion import plan_companion, request_on, shared_state
from autopar.planner.family import plan_family
from autopar.planner.memory_fit import MeshContext, StepOnMesh, leanest
from autopar.planner.planned import Planned, make_plan
from autopar.planner.remat import Form
from autopar.planner.request import Request, is_small
from autopar.planner.sliced_step import Source
from autopar.planner.stage_search import FoundStages, search_stages
from autopar.progress import LOGGER
from autopar.rules import unknown_ops

_MICROBATCHES = (2, 4, 8, 16, 32, 64)  # tried for a step that does not fit
_FEW = 200  # ops up to which all of them may be
_MORE_DEVICES = (2, 4, 8, 16)  # times
_LESS = 0.98  # of the bytes, that twice the devices hold at most where more may help


def plan_step(source: Source, request: Request, watchers: Sequence[Watcher] = ()) -> Planned:
    """Plans one program or stage programs, whichever is asked for; the faster where that is open.

    Where stages or microbatches are not asked for by number, a step that cannot be cut into them
    is one program. Else it is planned both ways and compared; one program of a deep step, which
    takes longer to plan, only where it may be the faster one by the prices of its layers. The error
    of a step for which memory is too small says what was planned and found to do.
    """
    # 0. A companion has its mesh, or its stages, from the plan that it runs beside.
    if request.beside is not None:
        if len(request.beside.submeshes) > 1:
            return plan_companion(source, request, watchers)
        graph = source.plain.graph
        own = request_on(request, graph, shared_state(graph, request.beside))
        return replace(_plan_one_program(source, own, watchers), request=request)
    # A family counts where it is one program; stages are chosen for the step alone.
    if source.family and request.is_one_program:
        return plan_family(source, request, _meshes(request), plan_step)
    # 1. One program is all that is asked for. A refusal says what else would fit.
    if request.is_one_program:
        return _plan_one_program(
            source, request, watchers, remedies=lambda lean: _remedies(source, request, lean)
        )
    # 2. Stages or microbatches, asked for or allowed. A refusal of both says why there are none.
    why = ""
    try:
        found = search_stages(source, request, request.setting(watchers))
    except (BatchError, InfeasibleError) as error:
        if not request.may_be_one_program:
            raise
        found, why = None, str(error)
    if found is None:
        try:
            return _plan_one_program(source, request, watchers)
        except MemoryLimitError as error:
            raise MemoryLimitError(f"{error}\nIn stages: {why}" if why else str(error)) from None
    # 3. Both are allowed, and one program may be faster: the faster of the two.
    stages = _in_stages(source, request, found)
    known = stages.plan.prediction.seconds
    if not request.may_be_one_program:
        return stages
    if not is_small(source.plain.graph) and found.least_whole_seconds >= known:
        return stages
    try:
        whole = _plan_one_program(source, request, watchers, known)
    except InfeasibleError:
        return stages
    faster = whole.plan.prediction.seconds <= stages.plan.prediction.seconds
    return whole if faster else stages


def warn_of_unknown(graph: Graph) -> None:
    """Warn once of each primitive that has no rule."""
    for op in unknown_ops(graph):
        where = op.origin.line or op.origin.module or "an unknown line"
        warnings.warn(
            f"primitive {op.kind!r} at {where} has no sharding rule: it runs whole on every "
            f"device. Give it one with rules=RuleBook({{{op.kind!r}: ...}}).",
            stacklevel=2,
        )


def _plan_one_program(
    source: Source,
    request: Request,
    watchers: Sequence[Watcher],
    fastest: float = math.inf,
    remedies: Callable[[Form], str] | None = None,
) -> Planned:
    """The best plan of one program over the meshes that the request allows.

    What promises to take longer than the `fastest` that is known is not gone into. Raises
    MeshError, PinError, MemoryLimitError or InfeasibleError where there is none. Where memory is
    too small the error ends with the `remedies` that are found for the form that holds the least.
    """
    readings = Readings()
    contexts = [MeshContext.of(mesh, request, watchers, readings) for mesh in _meshes(request)]
    if not contexts:
        raise InfeasibleError("no mesh fits the cluster")
    return _plan_on(contexts, source, fastest, remedies)


def _plan_on(
    contexts: Sequence[MeshContext],
    source: Source,
    fastest: float = math.inf,
    remedies: Callable[[Form], str] | None = None,
) -> Planned:
    """The best plan of one program on some meshes."""
    tried = try_meshes(contexts, source.plain)
    best = best_of(tried, fastest)
    if best is None and fastest < math.inf:
        raise InfeasibleError("no plan of one program was found that may be as fast")
    if best is None:
        # What would do is told of the mesh on which a plan came nearest.
        nearest = min(tried.values(), key=lambda t: t.nearest_bytes, default=None)
        step = leanest(nearest) if nearest else StepOnMesh(contexts[0], source.plain)
        error = step.refusal()
        if remedies is None or not isinstance(error, MemoryLimitError):
            raise error
        raise MemoryLimitError(f"{error}\n{remedies(step.form)}")
    context, found = best
    request, programs = context.request, found.programs
    trace = MicrobatchTrace.of_whole(found.form.traced)
    layers_of = (len(programs.placed.stages.layers.layers),)
    recomputed = found.form.recomputed
    plan = make_plan(source, request, trace, programs, found.outcome, layers_of, recomputed)
    return Planned(source, request, trace, plan, programs, context)


def _in_stages(source: Source, request: Request, found: FoundStages) -> Planned:
    """The plan of stage programs that were found."""
    timing = found.programs.timing
    priced, examined = found.choice.seconds, found.ranked.examined
    sentence = (
        f"The best of {examined} simulated candidates; the search, layer by layer, had priced it "
        f"at {show_seconds(priced)}."
    )
    if timing.issue_seconds > timing.device_seconds:
        sentence += (
            f" Its devices take {show_seconds(timing.device_seconds)}, but a host "
            f"{show_seconds(timing.issue_seconds)} to issue all programs and transfers of a step: "
            "larger microbatches, or fewer stages, give it less to do."
        )
    outcome = Outcome(Status.FEASIBLE, timing.seconds, timing.work_seconds, sentence, found.margins)
    trace, programs = found.trace, found.programs
    plan = make_plan(source, request, trace, programs, outcome, found.layers_of)
    return Planned(source, request, trace, plan, programs)


def _remedies(source: Source, request: Request, lean: Form) -> str:
    """A sentence on microbatches and more devices: what fits, or that neither does."""
    able = [*_with_microbatches(source, request), *_with_more_devices(lean, request)]
    if not able:
        return "Neither microbatches nor more devices of the kind were found to make it fit."
    return f"Planned and found to fit: {', '.join(able)}."


def _with_microbatches(source: Source, request: Request) -> Iterator[str]:
    """The fewest microbatches with which there is a plan, found by halving.

    Of a step whose planning takes its time, only the fewest and the most are tried.
    """
    try:
        counts = [n for n in _MICROBATCHES if source.rows % n == 0]
    except BatchError:
        return
    # What fits on a mesh of one axis is among the plans of more axes too.
    axes = 1 if request.method == "auto" and not request.pins else request.mesh_axes
    found = ""
    if source.plain.graph.op_count > _FEW:
        counts = list(dict.fromkeys((*counts[:1], *counts[-1:])))
    low, high = 0, len(counts)
    at = high - 1  # the most first: where they do not help, no fewer do
    while low < high:
        asked = replace(request.with_microbatches(counts[at]), mesh_axes=axes)
        try:
            stages = search_stages(source, asked, asked.setting())
        except AutoparError:  # whatever it is, they do not help
            stages = None
        if stages is None:
            low = at + 1
        else:
            high = at
            peak = show_bytes(_in_stages(source, asked, stages).plan.prediction.peak_bytes)
            found = f"microbatches={counts[at]} ({peak} a device)"
        at = (low + high) // 2
    if found:
        yield found


def _with_more_devices(lean: Form, request: Request) -> Iterator[str]:
    """The fewest devices of the kind, in powers of two, on which a plan of a form is found to fit.

    Where twice as many hold hardly less, no more do: what there is to shard by is used up.
    """
    cluster = request.cluster
    if request.mesh is not None and not request.mesh.names:
        return
    before = math.inf
    for factor in _MORE_DEVICES:
        try:
            larger = cluster.times(factor)
        except ClusterError:
            continue
        wider = request.mesh
        if wider is not None:  # pins may name its axes
            wider = replace(wider, sizes=(factor * wider.sizes[0], *wider.sizes[1:]))
        asked = replace(request, cluster=larger, memory_bytes=request.budget_bytes, mesh=wider)
        with suppress(AutoparError):  # pins that do not divide, say
            step = StepOnMesh(MeshContext.of(_meshes(asked)[0], asked), lean)
            if not step.may_fit():
                continue
            found = step.fit(light=step.light())
            if found.best is not None:
                yield f"{larger.name} ({show_bytes(found.best.peak_bytes)} a device)"
                return
            if found.fewest_bytes > _LESS * before:
                return
            before = found.fewest_bytes


def replan(before: Planned, pins: Pins, memory_bytes: int | None) -> Planned:
    """The same step under other pins and another limit, in one program on its mesh or in stages.

    What was traced and priced is used again. Raises PinError, MemoryLimitError or InfeasibleError
    where there is no plan.
    """
    request = replace(before.request, pins=pins, memory_bytes=memory_bytes)
    if before.context is None or request.beside is not None:
        return plan_step(before.source, request)
    return _plan_on([replace(before.context, request=request, watchers=())], before.source)


def _meshes(request: Request) -> tuple[MeshShape, ...]:
    """The request's own mesh, or the candidates that its method makes sense on."""
    if request.mesh is not None:
        return (request.mesh,)
    count = request.cluster.device_count
    if request.method in ("dp", "zero1", "zero2", "fsdp"):
        return mesh_shapes(count, 1)
    found = request.meshes_on(request.cluster)
    if request.pins and len(found) < len(mesh_shapes(count, request.mesh_axes)):
        meshes = " ".join(f"({mesh})" for mesh in found)
        LOGGER.info("only meshes with the axes that pins name are tried: %s", meshes)
    if request.method in ("hsdp", "fsdp+tp"):  # two kinds of axis
        return tuple(s for s in found if len(s.names) > 1) or found
    return found
