"""The front door of steps: parallelize one, plan it, check it; `autopar.plans` is that of plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack, cast, overload

from autopar.cluster import Cluster as Cluster
from autopar.cost.profile import profile_of
from autopar.frontend import StepSpec, read_call, trace
from autopar.frontend.devices import keep_to_cpu as keep_to_cpu
from autopar.gc_pause import paused_collection
from autopar.inspecting.lint import lint as lint_step
from autopar.inspecting.loaded_plan import reopen
from autopar.inspecting.why_not import why_not as why_not_opened
from autopar.ir.compiler_options import merged_options
from autopar.ir.explanation import Counterfactual
from autopar.ir.findings import Findings
from autopar.ir.plan import Plan
from autopar.ir.plan_file import a_plan
from autopar.ir.profile import Profile
from autopar.ir.sharding import MeshShape
from autopar.ir.verification import Verification as Verification
from autopar.options import (
    argnames_of,
    argnums_of,
    batch_axes_of,
    cache_of,
    check_names,
    check_order,
    check_sizes,
    check_state_is_not_static,
    checked_options,
    cluster_of,
    compiler_options_of,
    count_of,
    flag_of,
    memory_bytes_of,
    mesh_axes_of,
    mesh_of,
    method_of,
    microbatches_of,
    passes_of,
    patience_of,
    pins_of,
    plan_of,
    remat_of,
    rules_of,
    schedule_of,
    step_of,
    transport_of,
)
from autopar.passes.base import Watcher as Watcher
from autopar.passes.pipeline import PassPipeline
from autopar.planner.compatibility import check_cluster
from autopar.planner.plan import warn_of_unknown
from autopar.planner.planned import Planned as Planned
from autopar.planner.request import Request
from autopar.rules import RuleBook, attach_rules
from autopar.runtime.join import distributed as distributed
from autopar.runtime.own_rows import OwnRows as OwnRows
from autopar.runtime.shardings import partition_spec as partition_spec
from autopar.runtime.shardings import shardings as shardings
from autopar.runtime.validation.ranks import over_processes as over_processes
from autopar.runtime.validation.ranks import serve as serve
from autopar.runtime.validation.steps import open_cpu_devices as open_cpu_devices
from autopar.runtime.validation.steps import with_created as with_created
from autopar.step import P, R
from autopar.step import ParallelStep as ParallelStep

# Any: a jax.sharding.Mesh, of which this floor knows nothing.
MeshLike = MeshShape | str | int | Sequence[int] | Mapping[str, int] | Any


class PlanOptions(TypedDict, total=False):
    """The options of `parallelize`, which says what they mean."""

    cluster: Cluster | str | None
    mesh: MeshLike | None
    method: str
    memory_gb: float | None
    pins: Mapping[str, Any] | None
    plan: Plan | str | Path | None
    donate: bool
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    state_argnums: int | Sequence[int] | None
    mesh_axes: int
    rules: RuleBook
    remat: Literal["auto", False]
    stages: Literal["auto"] | int
    microbatches: Literal["auto"] | int | None
    schedule: str
    batch_axes: Mapping[str, int | None] | None
    passes: str | None
    transport: Literal["auto", "pull", "put"]
    patience: float | Literal["auto"] | None
    cache: str | Path | Literal[False] | None
    compiler_options: Mapping[str, bool | int | str] | None


class Parallelizer(Protocol):
    """The decorator that `parallelize(...)` without a step is."""

    def __call__(self, fun: Callable[P, R], /) -> ParallelStep[P, R]:
        """The step on the cluster, with the signature that it has."""
        ...


@overload
def parallelize(fun: Callable[P, R], **options: Unpack[PlanOptions]) -> ParallelStep[P, R]: ...


@overload
def parallelize(**options: Unpack[PlanOptions]) -> Parallelizer: ...


@checked_options
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    mesh: MeshLike | None = None,
    method: str = "auto",
    memory_gb: float | None = None,
    pins: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    donate: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    state_argnums: int | Sequence[int] | None = None,
    mesh_axes: int = 2,
    rules: RuleBook = RuleBook(),
    remat: Literal["auto", False] = "auto",
    stages: Literal["auto"] | int = 1,
    microbatches: Literal["auto"] | int | None = None,
    schedule: str = "auto",
    batch_axes: Mapping[str, int | None] | None = None,
    passes: str | None = None,
    transport: Literal["auto", "pull", "put"] = "auto",
    patience: float | Literal["auto"] | None = "auto",
    cache: str | Path | Literal[False] | None = None,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Any:
    """Make a train step run on a whole cluster.

    Args:
        fun: the step, `(state, batch) -> (state, metrics)` or any function of pytrees, plain or
            under jax.jit, nnx.jit or eqx.filter_jit; one that changes nnx objects in place does so
            here. Left out, `parallelize(...)` is a decorator.
        cluster: a name ("8xh100", "v5p:4x4x4"), a TOML file, a Cluster; None is the local devices.
        mesh: sizes, named sizes or a jax.sharding.Mesh, whose order of devices is kept; None
            searches the shapes of up to `mesh_axes` axes.
        method: "auto", or a recipe: "dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence",
            "fsdp+tp", "expert".
        memory_gb: GiB (2**30 bytes) that one device may hold; None is the cluster's own figure.
        pins: {path pattern: PartitionSpec}, over paths such as "params/**/kernel".
        plan: a plan made before, or its file; nothing is solved then. Of a folder of plans, as
            `autopar plan --fallbacks` writes it, that for the hosts which are here.
        donate: whether the state's buffers are reused for the new state; what is passed again
            after that raises ArgumentError.
        static_argnums: positions of arguments that are compile-time constants.
        static_argnames: names of such arguments.
        state_argnums: which arguments are state; None finds those that an output mirrors.
        mesh_axes: the most axes that a searched mesh may have.
        rules: sharding rules for primitives that autopar does not know.
        remat: "auto" computes forward values again for the backward pass where memory binds and
            that is cheaper than sharding more, or where it is faster; False never does.
        stages: pipeline stages, each on a submesh of its own; "auto" searches them, and may find
            that one program is best.
        microbatches: into how many the batch is cut, exactly, or "auto"; None is 1 for one stage
            and "auto" for more.
        schedule: "auto" or one of `autopar schedule`: "gpipe", "1f1b", "eager-1f1b",
            "interleaved", "zb-h1", "zb-h2", "zb-v", ...
        batch_axes: {path pattern: axis} of arguments whose rows are not on axis 0, None for none.
        passes: the passes and their options as text, such as "shard{recipe=fsdp},lower", in place
            of `method`, `stages`, `microbatches` and `schedule`.
        transport: what takes arrays from one process to another, where stages are on several:
            "pull" (sockets), "put" (`jax.device_put`); "auto" is pull on CPUs, else put.
        patience: seconds after which a step that makes no progress ends the job, and says what each
            submesh did last and what it waits for; None never looks. "auto" is 600 for stages and
            microbatches, and None for one program.
        cache: a folder of plans, in which one is looked for before it is made, and kept; None is
            the folder `autopar-plans` in JAX's `jax_compilation_cache_dir` where that is set, False
            none.
        compiler_options: options of XLA, {"xla_...": value}, put over those that the planner
            chooses or a given plan has; `plan.compiler_options` are all.

    Returns a ParallelStep. Raises an InputError that names the option for one that cannot be used;
    planning errors come at the first call.
    """
    if fun is None:
        return functools.partial(
            parallelize, cluster=cluster, mesh=mesh, method=method, memory_gb=memory_gb, pins=pins,
            plan=plan, donate=donate, static_argnums=static_argnums,
            static_argnames=static_argnames, state_argnums=state_argnums, mesh_axes=mesh_axes,
            rules=rules, remat=remat, stages=stages, microbatches=microbatches,
            schedule=schedule, batch_axes=batch_axes, passes=passes, transport=transport,
            patience=patience,
            cache=cache, compiler_options=compiler_options,
        )  # fmt: skip
    given, asked = plan_of(plan, cluster), compiler_options_of(compiler_options)
    shape, order = mesh_of(mesh)
    chosen = cluster_of(cluster, given)
    if given is not None:
        check_cluster(given, chosen)
    if given is not None and asked:
        given = replace(given, compiler_options=merged_options(given.compiler_options, asked))
    wanted = count_of(stages, "stages")
    request = Request(
        cluster=chosen,
        mesh=shape,
        passes=passes_of(
            passes,
            method_of(method),
            wanted,
            microbatches_of(microbatches, wanted),
            schedule_of(schedule),
        ),
        memory_bytes=memory_bytes_of(memory_gb),
        pins=pins_of(pins),
        mesh_axes=mesh_axes_of(mesh_axes),
        rules=rules_of(rules),
        remat=remat_of(remat),
        batch_axes=batch_axes_of(batch_axes),
        order=order,
        compiler_options=asked,
    )
    check_order(request)
    check_sizes(request)
    parallel = _parallel(fun)
    before = parallel.spec if parallel is not None else None
    step = before.fun if before is not None else step_of(fun)
    static = argnums_of(static_argnums, "static_argnums", step)
    names = argnames_of(static_argnames, step)
    state = argnums_of(state_argnums, "state_argnums", step) if state_argnums is not None else None
    if before is not None:  # what is not said anew stays as it was
        static, names = static or before.static_argnums, names or before.static_argnames
        state = before.state_argnums if state is None else state
    check_state_is_not_static(state, static, names, step)
    recorded = dict(given.record.rules) if given is not None and given.record is not None else {}
    kept = frozenset(name.partition(":")[0] for name in (*request.rules.extra, *recorded))
    if before is not None:
        kept |= before.kept
    spec = StepSpec(step, static, names, state, kept)
    travels = transport_of(transport)
    made: ParallelStep[..., Any] = ParallelStep(
        spec,
        request,
        flag_of(donate, "donate"),
        given,
        travels,
        patience_of(patience),
        cache_of(cache),
    )
    return made


def _parallel(fun: object) -> ParallelStep[..., Any] | None:
    return cast("ParallelStep[..., Any]", fun) if isinstance(fun, ParallelStep) else None


def plan(fun: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """The plan of a step on these arguments, concrete or abstract; options as for parallelize."""
    check_names("plan", options, tuple(PlanOptions.__annotations__))
    step = parallelize(step_of(fun), **options)
    return step.plan_for(*args)


def verify(plan: Plan, fun: Callable[..., Any], *args: Any, **options: Any) -> Verification:
    """A plan beside the truth, for the step that it was made for: see ParallelStep.verify.

    Raises PlanMismatchError, naming what differs, where it was made for another step.
    """
    return under_plan(fun, plan).verify(*args, **options)


def under_plan(fun: Callable[..., Any], plan: Plan) -> ParallelStep[..., Any]:
    """A step, parallelized before or not, under a plan that was made for it."""
    step = _parallel(fun) or parallelize(step_of(fun), plan=a_plan(plan))
    return step.under(a_plan(plan))


def why_not(plan: Plan, pins: Mapping[str, Any]) -> Counterfactual:
    """Tell what {path pattern: PartitionSpec} would change; mesh, stages and remat stay.

    Raises PinError where a pin cannot be used. `ParallelStep.what_if` plans the whole step anew.
    """
    with paused_collection():
        return why_not_opened(reopen(a_plan(plan)), pins_of(pins))


def lint(
    fun: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | None = None,
    microbatches: int = 1,
    kwargs: Mapping[str, Any] | None = None,
) -> Findings:
    """Tell what of a step on these arguments, arrays or shapes, can be sharded and cut up.

    `kwargs` are its keyword arguments. Raises TraceError where the step does not trace.
    """
    passes = PassPipeline.of_options(microbatches=microbatches_of(microbatches, 1))
    request = Request(cluster_of(cluster), passes=passes)
    step = parallelize(step_of(fun), cluster=request.cluster)
    call = read_call(step.spec, args, dict(kwargs or {}))
    return lint_step(call.spec, call.args, call.kwargs, request)


def profile(
    fun: Callable[..., Any],
    *args: Any,
    cluster: Cluster,
    depth: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Profile:
    """The layers of a step on these arguments, with predicted times on one device of a cluster.

    A layer is a module, nested at most `depth` deep. Raises TraceError where the step does not
    trace.
    """
    call = read_call(parallelize(step_of(fun), cluster=cluster).spec, args, dict(kwargs or {}))
    graph = attach_rules(trace(call.spec, call.args, call.kwargs).graph, RuleBook())
    warn_of_unknown(graph)
    source = f"predicted by autopar for one device of {cluster.name}"
    return profile_of(graph, cluster.chip, depth, source)
