"""From a traced step to a plan, and from a plan back to a program: no device is touched."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from autopar.cluster import Cluster, mesh_shapes
from autopar.cost.memory import held_bytes
from autopar.errors import (
    InfeasibleError,
    InputError,
    MemoryLimitError,
    MeshError,
    PlanMismatchError,
)
from autopar.frontend import TracedStep, build
from autopar.frontend.compat import jax_minor
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Origin, Plan, Prediction, arguments_of, outputs_of, traffic_of
from autopar.ir.spmd import SpmdProgram
from autopar.ir.text import show_bytes
from autopar.passes.base import Setting, Watcher
from autopar.passes.pipeline import Decided, Pipeline, lower
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import recipe_named
from autopar.rules import RuleBook, attach_rules, unknown_ops

Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
_TIGHTENINGS = 6


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

    @property
    def budget_bytes(self) -> int:
        """Bytes that one device may hold."""
        return self.memory_bytes if self.memory_bytes is not None else self.cluster.memory_bytes


def graph_of(traced: TracedStep, rules: RuleBook) -> Graph:
    """The graph of a step with its rules; warns once of each primitive that has none."""
    graph = attach_rules(build(traced), rules)
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
) -> tuple[Plan, SpmdProgram]:
    """The best plan over the meshes that the request allows, and its program.

    Raises MeshError, PinError, MemoryLimitError or InfeasibleError where there is none.
    """
    best: tuple[Plan, SpmdProgram] | None = None
    failure: InfeasibleError | None = None
    for mesh in _meshes(request):
        try:
            found = _plan_on(mesh, traced, graph, request, watchers)
        except InfeasibleError as error:
            failure = failure or error
            continue
        if best is None or found[0].prediction.seconds < best[0].prediction.seconds * (1 - 1e-9):
            best = found
    if best is None:
        raise failure or InfeasibleError("no mesh fits the cluster")
    return best


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
    named = {a for _, dims in request.pins for axes in dims for a in axes}
    able = tuple(s for s in shapes if named <= set(s.names))
    return able or shapes


def _plan_on(
    mesh: MeshShape,
    traced: TracedStep,
    graph: Graph,
    request: Request,
    watchers: Sequence[Watcher],
) -> tuple[Plan, SpmdProgram]:
    """The plan on one mesh; the limit is tightened until what is really held fits it."""
    budget = request.budget_bytes
    allowed, peak = budget, 0
    pipeline = Pipeline(shard=Optimal(recipe=recipe_named(request.method)))
    for _ in range(_TIGHTENINGS):
        setting = Setting(request.cluster, mesh, allowed, request.pins, time.perf_counter)
        decided = pipeline.run(graph, setting, tuple(watchers))
        peak = held_bytes(decided.graph, decided.program, mesh).peak_bytes
        if peak <= budget:
            return _plan(traced, decided, request), decided.program
        # What the rows leave out (gathered copies) is over: give them that much less.
        allowed -= max(peak - budget, budget // 64)
        if allowed <= 0:
            break
    raise MemoryLimitError(
        f"no plan on ({mesh}) fits {show_bytes(budget)} a device once gathered copies are counted: "
        f"the best found holds {show_bytes(peak)}. Raise memory_gb, use more devices or a smaller "
        "batch."
    )


def _plan(traced: TracedStep, decided: Decided, request: Request) -> Plan:
    graph, program = decided.graph, decided.program
    mesh = decided.sharding.mesh
    traffic = traffic_of(program)
    held = held_bytes(graph, program, mesh)
    communication = sum(t.seconds for t in traffic)
    return Plan(
        origin=Origin(
            step=traced.name,
            graph_key=traced.key,
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
        ),
        layer_count=len(decided.stages.layers.layers),
        stage_count=len(decided.stages.stages),
        microbatches=decided.stages.microbatches,
    )


def program_of(plan: Plan, traced: TracedStep, graph: Graph) -> SpmdProgram:
    """The program of a plan that was made before; nothing is solved.

    Raises PlanMismatchError, naming what differs, where the plan is for another step or JAX.
    """
    check_plan(plan, traced)
    cluster = Cluster.from_toml_text(plan.origin.cluster, "the plan's cluster")
    setting = Setting(cluster, plan.mesh, plan.origin.memory_bytes)
    plan.sharding.verify(graph)
    return lower(graph, plan.sharding, setting)


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
    graph = build(traced)
    here = {i.path: (i.value.shape, i.value.dtype) for i in graph.inputs}
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
