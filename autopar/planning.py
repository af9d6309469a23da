"""From a traced step to a plan, and from a plan back to a program: no device is touched."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from autopar.cluster import Cluster, mesh_shapes
from autopar.cost.memory import Held, held_bytes
from autopar.cost.prices import Prices
from autopar.errors import (
    InfeasibleError,
    InputError,
    MemoryLimitError,
    MeshError,
    PlanMismatchError,
)
from autopar.frontend import TracedStep
from autopar.frontend.compat import jax_minor
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Origin, Plan, Prediction, arguments_of, outputs_of, traffic_of
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import SpmdProgram
from autopar.passes.base import Setting, Watcher
from autopar.passes.pipeline import Decided, Pipeline, lower
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.lightest import Lightest
from autopar.passes.shard.moves import MoveTables
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import recipe_named
from autopar.remat import Form, form_of, leaner_forms
from autopar.rules import RuleBook, attach_rules, unknown_ops

_ROOMY = 2**60  # bytes that bind nothing
_NO_GAIN = 1e-9
_CLOSE = 0.005  # of the seconds without a limit
Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
_TIGHTENINGS = 6


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
    site: Site


@dataclass(frozen=True)
class Request:
    """What to plan for: the cluster, the mesh (None: searched), the method, limits and pins."""

    cluster: Cluster
    mesh: MeshShape | None = None
    method: str = "auto"
    memory_bytes: int | None = None
    pins: Pins = ()
    mesh_axes: int = 2
    rules: RuleBook = field(default_factory=RuleBook)
    remat: bool = True

    @property
    def budget_bytes(self) -> int:
        """Bytes that one device may hold."""
        return self.memory_bytes if self.memory_bytes is not None else self.cluster.memory_bytes


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
    best: tuple[Site, _Found] | None = None
    failure: InfeasibleError | None = None
    for mesh in _meshes(request):
        site = Site.of(mesh, request, watchers)
        try:
            found = _plan_on(site, plain)
        except InfeasibleError as error:
            failure = failure or error
            continue
        if best is None or found.seconds < best[1].seconds * (1 - _NO_GAIN):
            best = site, found
    if best is None:
        raise failure or InfeasibleError("no mesh fits the cluster")
    return _planned(*best, plain)


def replan(before: Planned, pins: Pins, memory_bytes: int | None) -> Planned:
    """The same step on the same mesh under other pins and another limit.

    What was traced and priced is used again. Raises PinError, MemoryLimitError or InfeasibleError
    where there is no plan.
    """
    request = replace(before.site.request, pins=pins, memory_bytes=memory_bytes)
    site = replace(before.site, request=request, watchers=())
    return _planned(site, _plan_on(site, before.plain), before.plain)


def _planned(site: Site, found: _Found, plain: Form) -> Planned:
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


@dataclass(frozen=True)
class Site:
    """One mesh for a request, and the prices there, which all plans on it share."""

    mesh: MeshShape
    request: Request
    watchers: tuple[Watcher, ...]
    tables: MoveTables

    @classmethod
    def of(cls, mesh: MeshShape, request: Request, watchers: Sequence[Watcher] = ()) -> Site:
        """A site where nothing is priced yet."""
        tables = MoveTables(Prices(request.cluster, mesh))
        return cls(mesh, request, tuple(watchers), tables)

    def setting(self, memory_bytes: int) -> Setting:
        """What passes are given here within a limit."""

        def weigh(graph: Graph, plan: ShardingPlan) -> float:
            return held_bytes(graph, lower(graph, plan, setting), self.mesh).peak_bytes

        request = self.request
        setting = Setting(
            request.cluster, self.mesh, memory_bytes, request.pins, time.perf_counter, weigh,
            self.watchers,
        )  # fmt: skip
        return setting

    def optimal(self) -> Optimal:
        """The pass that looks for the cheapest plan by the request's method."""
        return Optimal(recipe=recipe_named(self.request.method), tables=self.tables)

    def cheapest(self, form: Form, memory_bytes: int) -> _Found:
        """The cheapest plan of which the pass counts no more than a limit."""
        return self._found(form, self.optimal(), self.setting(memory_bytes))

    def lightest(self, form: Form) -> _Found:
        """The plan that holds the least."""
        shard = Lightest(recipe=recipe_named(self.request.method))
        return self._found(form, shard, self.setting(self.request.budget_bytes))

    def _found(self, form: Form, shard: AbstractSharding, setting: Setting) -> _Found:
        decided = Pipeline(shard=shard).run(form.graph, setting)
        return _Found(form, decided, held_bytes(decided.graph, decided.program, self.mesh))


@dataclass(frozen=True)
class _Found:
    """A form of the step, what was decided for it, and what that holds."""

    form: Form
    decided: Decided
    held: Held

    @property
    def seconds(self) -> float:
        """What a step should take."""
        return self.decided.sharding.outcome.seconds


def _plan_on(site: Site, plain: Form) -> _Found:
    """The plan on one mesh; where memory binds, recomputing is weighed against sharding more."""
    request = site.request
    if not request.remat:
        return _within(site, plain)
    roomy = site.cheapest(plain, _ROOMY)
    if roomy.held.peak_bytes <= request.budget_bytes:
        return roomy
    setting = site.setting(request.budget_bytes)
    forms = leaner_forms(plain, roomy.decided, setting, request.rules)
    leaner = _first_that_fits(site, forms)
    if leaner is not None and leaner.seconds <= roomy.seconds * (1 + _CLOSE):
        return leaner  # no plan within a limit that binds can cost less
    try:
        sharded = _within(site, plain)
    except InfeasibleError:
        if leaner is None:
            raise
        return leaner
    return sharded if leaner is None or sharded.seconds <= leaner.seconds else leaner


def _first_that_fits(site: Site, forms: Iterable[Form]) -> _Found | None:
    """The plan of the first form that has one within the budget: what follows costs more.

    A form's plan without a limit may do, and then no other of it is cheaper.
    """
    budget = site.request.budget_bytes
    for form in forms:
        for limit in (_ROOMY, budget):
            try:
                found = site.cheapest(form, limit)
            except InfeasibleError:
                break
            if found.held.peak_bytes <= budget:
                return found
    return None


def _within(site: Site, form: Form) -> _Found:
    """A plan within the budget: the limit is tightened until what is really held fits it.

    The last resort is the plan that holds the least, so that its bytes are a limit that will do.
    """
    budget = site.request.budget_bytes
    allowed, failure = budget, None
    for _ in range(_TIGHTENINGS):
        try:
            found = site.cheapest(form, allowed)
        except MemoryLimitError as error:
            failure = error if allowed == budget else None
            break
        peak = found.held.peak_bytes
        if peak <= budget:
            return found
        # What the rows leave out (gathered copies) is over: give them that much less.
        allowed -= max(peak - budget, budget // 64)
        if allowed <= 0:
            break
    found = site.lightest(form)
    if found.held.peak_bytes <= budget:
        return found
    raise failure or site.optimal().refusal(found.decided.graph, site.setting(budget))


def _plan(found: _Found, request: Request) -> Plan:
    form, decided, held = found.form, found.decided, found.held
    graph, program = decided.graph, decided.program
    traffic = traffic_of(program)
    communication = sum(t.seconds for t in traffic)
    return Plan(
        origin=Origin(
            step=form.traced.name,
            graph_key=form.traced.key,
            cluster=request.cluster.to_toml(),
            cluster_name=request.cluster.name,
            cluster_fingerprint=request.cluster.fingerprint(),
            jax_minor=jax_minor(),
            method=request.method,
            memory_bytes=request.budget_bytes,
            pins=request.pins,
        ),
        sharding=decided.sharding,
        arguments=arguments_of(graph, program),
        outputs=outputs_of(graph, program),
        prediction=Prediction(
            seconds=decided.sharding.outcome.seconds,
            communication_seconds=communication,
            traffic=traffic,
            argument_bytes=held.argument_bytes,
            peak_bytes=held.peak_bytes,
            peak=held.peak,
        ),
        layer_count=len(decided.stages.layers.layers),
        stage_count=len(decided.stages.stages),
        microbatches=decided.stages.microbatches,
        recomputation=form.recomputed,
    )


def planned_before(plan: Plan, traced: TracedStep, graph: Graph, rules: RuleBook) -> Planned:
    """The program of a plan that was made before; nothing is solved.

    Raises PlanMismatchError, naming what differs, where the plan is for another step or JAX.
    """
    check_plan(plan, traced)
    cluster = Cluster.from_toml_text(plan.origin.cluster, "the plan's cluster")
    setting = Setting(cluster, plan.mesh, plan.origin.memory_bytes)
    plain = Form(traced, graph)
    form = form_of(plain, plan.recomputation, rules)
    plan.sharding.verify(form.graph)
    program = lower(form.graph, plan.sharding, setting)
    origin = plan.origin
    request = Request(
        cluster, plan.mesh, origin.method, origin.memory_bytes, origin.pins, rules=rules
    )
    return Planned(form.traced, form.graph, plan, program, plain, Site.of(plan.mesh, request))


def check_plan(plan: Plan, traced: TracedStep) -> None:
    """Raise PlanMismatchError unless the plan is for this step under this JAX minor release."""
    faults = [*_argument_faults(plan, traced)]
    if plan.origin.jax_minor != jax_minor():
        faults.append(f"it was made with JAX {plan.origin.jax_minor}, this is JAX {jax_minor()}")
    if not faults and plan.origin.graph_key != traced.key:
        faults.append(
            "the arguments agree but the step's operations differ (graph "
            f"{plan.origin.graph_key[:12]} in the plan, {traced.key[:12]} here)"
        )
    if faults:
        lines = "\n".join(f"* {f}" for f in faults[:8])
        raise PlanMismatchError(
            f"the plan for {plan.origin.step} does not fit {traced.name}:\n{lines}\n"
            "Plan again for this step, or load the plan that was made for it."
        )


def _argument_faults(plan: Plan, traced: TracedStep) -> list[str]:
    planned = {a.path: (a.shape, a.dtype) for a in plan.arguments}
    here = {i.path: (i.value.shape, i.value.dtype) for i in traced.graph.inputs}
    faults = [f"argument {p} is in the plan only" for p in planned if p not in here]
    faults += [f"argument {p} is in the step only" for p in here if p not in planned]
    for path in planned.keys() & here.keys():
        if planned[path] != here[path]:
            (old_shape, old), (new_shape, new) = planned[path], here[path]
            faults.append(
                f"argument {path} is {old}{list(old_shape)} in the plan and "
                f"{new}{list(new_shape)} here"
            )
    return sorted(faults)


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanMismatchError unless the plan was made for this cluster."""
    if plan.origin.cluster_fingerprint != cluster.fingerprint():
        raise PlanMismatchError(
            f"the plan was made for cluster {plan.origin.cluster_name} and this is {cluster.name}: "
            "their devices, links or figures differ. Plan again for this cluster."
        )


def pins_of(given: Mapping[str, object] | None) -> Pins:
    """Pins from {path pattern: PartitionSpec or tuple of axis names}; raises InputError."""
    found: list[tuple[str, tuple[tuple[str, ...], ...]]] = []
    for pattern, spec in (given or {}).items():
        # A PartitionSpec iterates like a tuple but is none.
        if not isinstance(spec, Iterable) or isinstance(spec, str):
            raise InputError(
                f"pin {pattern!r} is {spec!r}; write a PartitionSpec such as P(None, 'model')"
            )
        entries = cast("Iterable[object]", spec)
        found.append((pattern, tuple(_dim_axes(entry) for entry in entries)))
    return tuple(found)


def _dim_axes(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, Sequence):
        return tuple(str(a) for a in cast("Sequence[object]", entry))
    raise InputError(f"a pin's dim is {entry!r}; write None, an axis name or a tuple of them")
