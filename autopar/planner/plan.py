"""From a traced step to a plan, and from a plan back to a program: no device is touched."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cluster import mesh_shapes
from autopar.cluster.planned import cluster_of
from autopar.cost.overlap import moved_seconds
from autopar.errors import (
    AutoparError,
    BatchError,
    ClusterError,
    InfeasibleError,
    MemoryLimitError,
    MeshError,
)
from autopar.frontend import TracedStep
from autopar.frontend.compat import jax_minor
from autopar.ir.batching import Batching
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan, Prediction, arguments_of, outputs_of, traffic_of
from autopar.ir.record import Record
from autopar.ir.spmd import SpmdProgram
from autopar.ir.text import show_bytes
from autopar.passes.base import Setting, Watcher
from autopar.passes.pipeline import lower
from autopar.planner.compatibility import check_ends, check_plan, contents_of
from autopar.planner.memory_fit import (
    MeshContext,
    MeshPlan,
    TriedMesh,
    best_recipe,
    plan_on,
    refusal,
    try_mesh,
)
from autopar.planner.planned_stages import PlannedStages, plan_stages
from autopar.planner.remat import Form, form_of
from autopar.planner.request import Pins, Request
from autopar.planner.source import Source
from autopar.rules import RuleBook, attach_rules, unknown_ops

_NO_GAIN = 1e-9
_MICROBATCHES = (2, 4, 8, 16, 32, 64)  # tried for a step that does not fit
_FEW = 200  # ops up to which all of them may be
_MORE_DEVICES = (2, 4, 8, 16)  # times
_MESHES = 8  # where memory binds, that are gone into
_ROUGH = 0.95  # overlap and recipes may make a plan within a limit faster than one without
_SMALL = 1500  # ops up to which one program is planned beside stages


@dataclass(frozen=True)
class Planned:
    """A step on one set of argument types: its trace and graph as they run, plan and program.

    `plain` is the step as it was traced, before anything was recomputed, and `site` holds what was
    priced on the plan's mesh: other limits and pins start from there.
    """

    traced: TracedStep
    graph: Graph
    plan: Plan
    program: SpmdProgram
    plain: Form
    site: MeshContext


def graph_of(traced: TracedStep, rules: RuleBook) -> Graph:
    """The graph of a step with its rules; warns once of each primitive that has none."""
    graph = attach_rules(traced.graph, rules)
    for op in unknown_ops(graph):
        where = op.origin.line or op.origin.module or "an unknown line"
        warnings.warn(
            f"primitive {op.kind!r} at {where} has no sharding rule: it runs whole on every "
            f"device. Give it one with rules=RuleBook({{{op.kind!r}: ...}}).",
            stacklevel=2,
        )
    return graph


def make_plan(
    traced: TracedStep, graph: Graph, request: Request, watchers: Sequence[Watcher] = ()
) -> Planned:
    """The best plan over the meshes that the request allows, with its program.

    Raises MeshError, PinError, MemoryLimitError or InfeasibleError where there is none.
    """
    plain = Form(traced, graph)
    sites = [MeshContext.of(mesh, request, watchers) for mesh in _meshes(request)]
    best = _best_of(sites, plain)
    if best is None:
        raise refusal(sites[0], plain) if sites else InfeasibleError("no mesh fits the cluster")
    site, found = best
    if found.form is plain:
        found = best_recipe(site, plain, found, found) or found
    return _planned(site, found, plain)


def _best_of(sites: Sequence[MeshContext], plain: Form) -> tuple[MeshContext, MeshPlan] | None:
    """The site of the fastest plan with it; None where no plan fits.

    Every mesh is tried without a limit. Of those where that does not fit, which take long, only
    the most promising are gone into, and none that promises less than a plan that fits.
    """
    tried: dict[int, TriedMesh] = {}
    for n, site in enumerate(sites):
        start = time.perf_counter()
        with suppress(InfeasibleError):
            tried[n] = try_mesh(site, plain)
        for watcher in site.watchers:
            text = f"{n + 1} of {len(sites)}"
            watcher.after("mesh", text, tried.get(n), time.perf_counter() - start)
    found = {n: plan_on(t, plain) for n, t in tried.items() if t.fits}
    tight = [n for n, t in tried.items() if not t.fits]
    if len(tight) > 1:
        tried.update({n: tried[n].limited(plain) for n in tight})
        tight = sorted(tight, key=lambda n: tried[n].promise)[:_MESHES]
    for n in tight:
        fastest = min((f.seconds for f in found.values()), default=math.inf)
        within = tried[n].within
        least = within.seconds if within is not None else _ROUGH * tried[n].roomy.seconds
        if least < fastest:
            with suppress(InfeasibleError):
                found[n] = plan_on(tried[n], plain)
    best: int | None = None
    for n in sorted(found):
        if best is None or found[n].seconds < found[best].seconds * (1 - _NO_GAIN):
            best = n
    return (sites[best], found[best]) if best is not None else None


def plan_step(
    graph: Graph, request: Request, source: Source, watchers: Sequence[Watcher] = ()
) -> Planned | PlannedStages:
    """One program or stage programs, as the request says; the faster where it leaves that open.

    Where stages or microbatches are not asked for by number, a step that cannot be cut into them
    is one program. Small steps are planned both ways and compared; of large ones the search over
    stages says which is faster, as its prices are closer and planning takes longer. The error of a
    step for which memory is too small says what was planned and found to do.
    """
    if request.is_one_program:
        try:
            return make_plan(source.traced, graph, request, watchers)
        except MemoryLimitError as error:
            plain = Form(source.traced, graph)
            raise MemoryLimitError(f"{error}\n{_remedies(plain, request, source)}") from None
    try:
        stages = plan_stages(source, request, _setting(request, watchers))
    except (BatchError, InfeasibleError):
        if not request.may_be_one_program:
            raise
        stages = None
    if stages is None:
        return make_plan(source.traced, graph, request, watchers)
    if not request.may_be_one_program or graph.op_count > _SMALL:
        return stages
    try:
        whole = make_plan(source.traced, graph, request, watchers)
    except InfeasibleError:
        return stages
    faster = whole.plan.prediction.seconds <= stages.plan.prediction.seconds
    return whole if faster else stages


def _remedies(plain: Form, request: Request, source: Source) -> str:
    """What else the step was planned with, in a sentence: what fits, or that nothing did."""
    fits = [
        *_with_microbatches(plain.graph.op_count, request, source),
        *_with_more_devices(plain, request),
    ]
    if not fits:
        return "Neither microbatches nor more devices of the kind were found to make it fit."
    return f"Planned and found to fit: {', '.join(fits)}."


def _with_microbatches(op_count: int, request: Request, source: Source) -> Iterator[str]:
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
    if op_count > _FEW:
        counts = list(dict.fromkeys((*counts[:1], *counts[-1:])))
    low, high = 0, len(counts)
    at = high - 1  # the most first: where they do not help, no fewer do
    while low < high:
        asked = replace(request, microbatches=counts[at], mesh_axes=axes)
        try:
            stages = plan_stages(source, asked, _setting(asked))
        except AutoparError:  # whatever it is, they do not help
            stages = None
        if stages is None:
            low = at + 1
        else:
            high = at
            peak = show_bytes(stages.plan.prediction.peak_bytes)
            found = f"microbatches={counts[at]} ({peak} a device)"
        at = (low + high) // 2
    if found:
        yield found


def _with_more_devices(plain: Form, request: Request) -> Iterator[str]:
    """The fewest devices of the kind, in powers of two, whose lightest plan fits."""
    cluster = request.cluster
    if request.mesh is not None and not request.mesh.names:
        return
    for factor in _MORE_DEVICES:
        try:
            larger = cluster.times(factor)
        except ClusterError:
            continue
        wider = request.mesh
        if wider is not None:  # pins may name its axes
            wider = replace(wider, sizes=(factor * wider.sizes[0], *wider.sizes[1:]))
        asked = replace(request, cluster=larger, memory_bytes=request.budget_bytes, mesh=wider)
        for mesh in _meshes(asked)[:1]:
            site = MeshContext.of(mesh, asked)
            with suppress(AutoparError):  # pins that do not divide, say
                peak = site.lightest(plain).held.peak_bytes if site.may_fit(plain) else math.inf
                if peak <= asked.budget_bytes:
                    yield f"{larger.name} ({show_bytes(peak)} a device)"
                    return


def _setting(request: Request, watchers: Sequence[Watcher] = ()) -> Setting:
    """What passes are given before there is a mesh."""
    return Setting(
        request.cluster, MeshShape((), ()), request.budget_bytes, (), time.perf_counter,
        watchers=tuple(watchers),
    )  # fmt: skip


def replan_any(
    before: Planned | PlannedStages, pins: Pins, memory_bytes: int | None
) -> Planned | PlannedStages:
    """The same step, in one program or in stages as before, under other pins and another limit."""
    if isinstance(before, Planned):
        return replan(before, pins, memory_bytes)
    request = replace(before.request, pins=pins, memory_bytes=memory_bytes)
    graph = graph_of(before.source.traced, request.rules)
    return plan_step(graph, request, before.source)


def replan(before: Planned, pins: Pins, memory_bytes: int | None) -> Planned:
    """The same step on the same mesh under other pins and another limit.

    What was traced and priced is used again. Raises PinError, MemoryLimitError or InfeasibleError
    where there is no plan.
    """
    request = replace(before.site.request, pins=pins, memory_bytes=memory_bytes)
    site = replace(before.site, request=request, watchers=())
    try:
        found = plan_on(try_mesh(site, before.plain), before.plain)
        return _planned(site, found, before.plain)
    except InfeasibleError:
        raise refusal(site, before.plain) from None


def _planned(site: MeshContext, found: MeshPlan, plain: Form) -> Planned:
    plan, form = _plan(found, site.request), found.form
    return Planned(form.traced, form.graph, plan, found.decided.program, plain, site)


def _meshes(request: Request) -> tuple[MeshShape, ...]:
    """The request's own mesh, or the candidates that its method makes sense on."""
    count = request.cluster.device_count
    if request.mesh is not None:
        if request.mesh.device_count != count:
            raise MeshError(
                f"mesh ({request.mesh}) has {request.mesh.device_count} devices, but cluster "
                f"{request.cluster.name} has {count}. Use a mesh whose sizes multiply to {count}, "
                "or a cluster of the mesh's size."
            )
        return (request.mesh,)
    if request.method in ("dp", "zero1", "zero2", "fsdp"):
        return mesh_shapes(count, 1)
    shapes = mesh_shapes(count, request.mesh_axes)
    if request.method in ("hsdp", "fsdp+tp"):  # two kinds of axis
        shapes = tuple(s for s in shapes if len(s.names) > 1) or shapes
    named = {a for _, dims in request.pins for axes in dims for a in axes}
    able = tuple(s for s in shapes if named <= set(s.names))
    return able or shapes


def _plan(found: MeshPlan, request: Request) -> Plan:
    form, decided, held = found.form, found.decided, found.held
    graph, program = decided.graph, decided.program
    seconds = found.timed.seconds
    traffic = traffic_of(program, moved_seconds(found.timed))
    return Plan(
        origin=request.origin(form.traced.name, form.traced.key, jax_minor()),
        sharding=decided.sharding,
        arguments=arguments_of(graph, program),
        outputs=outputs_of(graph, program),
        prediction=Prediction(
            seconds=seconds.total,
            communication_seconds=seconds.communication,
            exposed_seconds=seconds.exposed,
            traffic=traffic,
            argument_bytes=held.argument_bytes,
            peak_bytes=held.peak_bytes,
            peak=held.peak,
        ),
        layer_count=len(decided.stages.layers.layers),
        stage_count=len(decided.stages.stages),
        microbatches=decided.stages.microbatches,
        recomputation=form.recomputed,
        record=Record.of(Batching.whole(form.graph), request.rules.extra),
    )


def planned_before(plan: Plan, traced: TracedStep, graph: Graph, rules: RuleBook) -> Planned:
    """The program of a plan that was made before; nothing is solved.

    Raises PlanMismatchError, naming what differs, where the plan is for another step or JAX, and
    PlanFileError where it does not compute the step.
    """
    check_plan(plan, traced)
    cluster = cluster_of(plan)
    setting = Setting(cluster, plan.mesh, plan.origin.memory_bytes)
    plain = Form(traced, graph)
    form = form_of(plain, plan.recomputation, rules)
    with contents_of(plan):
        plan.check()
        plan.sharding.verify(form.graph)
        program = lower(form.graph, plan.sharding, setting)
        check_ends(plan, arguments_of(form.graph, program), outputs_of(form.graph, program))
    origin = plan.origin
    request = Request(
        cluster, plan.mesh, origin.method, origin.memory_bytes, origin.pins, rules=rules
    )
    return Planned(
        form.traced, form.graph, plan, program, plain, MeshContext.of(plan.mesh, request)
    )
