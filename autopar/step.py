"""A train step for a whole mesh: it plans, compiles and runs; here the two wings meet."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast

from autopar.cluster import Cluster
from autopar.cluster.planned import planned_cluster
from autopar.errors import ArgumentError, CheckpointError, PlanError, bulleted
from autopar.frontend import (
    Call,
    CallFacts,
    StepSpec,
    TracedStep,
    is_same_trace,
    pure_creation,
    read_call,
    trace,
)
from autopar.frontend.compat import (
    inside_transform,
    invalid_values,
    other_settings,
    runs_uncompiled,
)
from autopar.frontend.trace.arguments import dynamic_arguments
from autopar.frontend.trace.call import Signature
from autopar.frontend.trace.objects import opened_state
from autopar.frontend.trace.step import unplaced, wants_plain_steps
from autopar.gc_pause import paused_collection
from autopar.ir.compiled import CheckLevel
from autopar.ir.compiler_options import options_on, options_text
from autopar.ir.plan import Argument, Plan, Prediction, leaf_arguments
from autopar.ir.plan_file import a_plan, plan_from_json, plan_to_json
from autopar.ir.program import Program
from autopar.ir.projection import walks
from autopar.ir.rate import Rate
from autopar.ir.sharding import MeshShape
from autopar.ir.text import show_bytes, show_seconds
from autopar.ir.text_file import TRACE, check_output, write_text
from autopar.ir.verification import Verification
from autopar.options import (
    argnames_of,
    argnums_of,
    cluster_of,
    memory_bytes_of,
    number_of,
    pins_of,
    seconds_of,
    step_of,
    weight_of,
)
from autopar.passes.base import Watcher
from autopar.passes.lower.projections import Transports, verify_projections
from autopar.planner.companion import with_shared_state
from autopar.planner.plan import plan_step, replan, warn_of_unknown
from autopar.planner.plan_cache import PlanCache
from autopar.planner.planned import Planned
from autopar.planner.request import Request
from autopar.planner.restore import restore
from autopar.planner.sliced_step import Member, Source
from autopar.progress import LOGGER, Progress, progress
from autopar.report.html.page import html_summary
from autopar.runtime.bind import BoundMesh, bind_mesh, check_present, host_of, mesh_shape
from autopar.runtime.constrained import (
    check_surroundings,
    constrained_step,
    layout_of,
    spread_layout,
)
from autopar.runtime.executor import Executor, Options, lowered_parts
from autopar.runtime.interface import Interface
from autopar.runtime.job import ARGUMENTS, device_facts, this_job
from autopar.runtime.own_rows import Ranges
from autopar.runtime.place import deleted, deleted_arguments
from autopar.runtime.shardings import Shardings, bind_plan, step_shardings
from autopar.runtime.state import abstract_state, init
from autopar.runtime.timeline import Timeline, chrome_trace
from autopar.runtime.transport.abstract import AbstractTransport, in_flight_limit, nearest_awaited
from autopar.runtime.transport.choice import transport_for
from autopar.runtime.transport.local import LocalTransport
from autopar.runtime.watchdog import PATIENCE_SECONDS
from autopar.schedule.simulate import Simulation
from autopar.verifying.confirmed_fit import ConfirmedFit, confirm_fit
from autopar.verifying.shrink import Called
from autopar.verifying.verify import Inquiry, level_named, verify_planned

if TYPE_CHECKING:  # Orbax takes a second to import
    from autopar.runtime.checkpoint import Restored

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Recording:
    """A step as it was measured, and as the plan had it: of one program there is no schedule.

    `rate` is the measured MFU, with tokens or samples a second.
    """

    measured: Timeline
    predicted: Simulation | Prediction
    rate: Rate

    def __str__(self) -> str:
        predicted = self.predicted
        if isinstance(predicted, Prediction):
            return f"{self.measured}\n{self.rate}\npredicted  makespan {predicted.seconds:.6g} s"
        return f"{self.measured}\n{self.rate}\n{predicted}"


@dataclass(frozen=True)
class _Running:
    """A plan, what runs it, and the facts of the arguments that it is for."""

    planned: Planned
    executor: Executor
    facts: CallFacts

    @property
    def traced(self) -> TracedStep:
        """The whole step as the user wrote it."""
        return self.planned.source.traced


class ParallelStep(Generic[P, R]):
    """A train step for a whole mesh, called exactly like the plain one.

    The first call with new argument types plans (unless a plan was given), compiles and runs.
    Calls from several threads take turns, and so does planning. Inside `jax.jit`, `grad`, `vmap`,
    `scan` and the like it is the plain step, with the plan's layouts as constraints.
    """

    def __init__(
        self,
        spec: StepSpec,
        request: Request,
        donate: bool,
        plan: Plan | None = None,
        transport: str = "auto",
        patience: float | Literal["auto"] | None = "auto",
        cache: PlanCache | None = None,
        beside: ParallelStep[..., Any] | None = None,
    ) -> None:
        self._spec, self._request, self._donate = spec, request, donate
        self._beside = beside
        self._family: list[tuple[ParallelStep[..., Any], float, tuple[Any, ...]]] = []
        self._given, self._transport = plan, transport
        self._patience: float | Literal["auto"] | None = patience
        self._cache = cache
        self._planned: dict[Signature, Planned] = {}
        self._running: dict[Signature, _Running] = {}
        self._constrained: dict[Signature, Any] = {}
        # Programs of two calls that reach the devices in another order on each wait for one
        # another for ever. A thread may come back while it plans: watchers ask for the plan.
        self._turn = threading.RLock()
        self._latest: Planned | None = None
        self._has_told = False
        self._trace_path: Path | None = None
        self._recording: Recording | None = None
        self.__name__ = spec.name
        self.__wrapped__ = spec.fun

    @property
    def spec(self) -> StepSpec:
        """The plain step and how it is called: parallelizing a ParallelStep starts from it."""
        return self._spec

    # -- running ---------------------------------------------------------------------------

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a step. State that comes back is donated: use the returned one from then on.

        Inside a transform of JAX nothing runs and nothing is donated. Raises ArgumentError where
        an array was deleted, or consumed by an earlier step, and inside jax.shard_map;
        FloatingPointError where JAX looks for nan or inf and some is made.
        """
        if inside_transform():
            return cast("R", self._inline(args, kwargs))
        call = read_call(self._spec, args, kwargs)
        with self._turn:
            running = self._running.get(call.signature)
            if deleted(call.leaves):
                arguments = dynamic_arguments(call.spec, call.args, call.kwargs)
                traced = running.traced if running is not None else None
                raise deleted_arguments(call.spec, arguments, traced, self._donate)
            running = running or self._run(call)
            self._latest = running.planned
            if (watch := this_job().watch) is not None:
                watch.call()
            try:
                if self._trace_path is not None:
                    return cast("R", call.rebuild(self._recorded(running, call.leaves)))
                return cast("R", call.rebuild(running.executor(call.leaves)))
            except invalid_values() as error:
                raise FloatingPointError(
                    f"{self.__name__} made nan or inf, which jax.debug_nans or debug_infs looks "
                    "for. Within jax.disable_jit() it runs op by op and says which one did."
                ) from error

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """The step bound as a method, as functions and `jax.jit` are: `self` comes first."""
        return self if instance is None else MethodType(self, instance)

    def _inline(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The step as part of other code: of another parallel step, or of what JAX transforms."""
        if wants_plain_steps() or runs_uncompiled():
            return self._spec.fun(*args, **kwargs)
        check_surroundings(self._spec.name)
        call = read_call(self._spec, args, kwargs)
        with self._turn:
            if call.signature not in self._constrained:
                self._constrained[call.signature] = self._with_constraints(call)
        step = self._constrained[call.signature]
        return call.rebuild(step(*call.args, **call.kwargs))

    def _with_constraints(self, call: Call) -> Any:
        plan = self._planned_for(call).plan
        meshes = self._meshes(plan)
        if len(meshes) == 1:
            given = layout_of([a.sharding for a in plan.arguments], meshes[0])
            made = layout_of([o.sharding for o in plan.outputs], meshes[0])
        else:  # one program knows no submeshes
            given = made = spread_layout(self._flat())
        return constrained_step(call.spec, call.args, given, made)

    def trace(self, path: str | Path) -> None:
        """Measure the next step and write the spans of its programs to `path`.

        The file has Chrome's trace form (chrome://tracing, Perfetto); `recording` then holds the
        measured grid beside the predicted one. Of several processes each writes its own spans,
        process 1 to `path` with .1 before its suffix. Raises InputError where it cannot be written.
        """
        check_output(path, TRACE)
        self._trace_path = Path(path)

    @property
    def recording(self) -> Recording:
        """The step that was measured last; raises PlanError before there is one."""
        if self._recording is None:
            raise PlanError(f"no step was measured yet: {self.__name__}.trace('t.json'), then step")
        return self._recording

    def _recorded(self, running: _Running, leaves: Sequence[Any]) -> Any:
        path, self._trace_path = self._trace_path, None
        result, measured = running.executor.run_traced(leaves)
        planned = running.planned
        simulation = planned.programs.timing.simulation
        rate = planned.plan.rate(measured.makespan_seconds)
        self._recording = Recording(measured, simulation or planned.plan.prediction, rate)
        job, path = this_job(), path or Path("trace.json")
        if job.index:  # each process has measured its own part
            path = path.with_suffix(f".{job.index}{path.suffix}")
        write_text(json.dumps(chrome_trace(measured)), path)
        return result

    def init(self, create_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The state that `create_state(*args)` makes, every leaf born on its devices.

        Before there is a plan, leaves are cut up evenly over all devices and the first step
        moves them once.
        """
        created, closed = pure_creation(step_of(create_state, "create_state"))
        with self._turn:
            return closed(init(created, args, kwargs, *self._homes()))

    def abstract_state(self, create_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and shardings of the state that `init(create_state, *args)` makes.

        Nothing is computed. Of a stack of layers that stages share it has the pieces, each on its
        own devices.
        """
        created, closed = pure_creation(step_of(create_state, "create_state"))
        with self._turn:
            return closed(abstract_state(created, args, kwargs, *self._homes()))

    def _homes(self) -> tuple[Sequence[Argument] | None, Sequence[BoundMesh]]:
        """The plan's arguments and its meshes; before there is a plan, all devices in a row."""
        plan = self._latest.plan if self._latest is not None else self._given
        return (None, (self._flat(),)) if plan is None else (plan.arguments, self._meshes(plan))

    def save(
        self,
        manager: Any,
        number: int,
        state: Any,
        extras: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Save the state after `number` steps with an Orbax CheckpointManager; False if it skips.

        With `force` it skips only what is there already.

        Each process writes what it keeps; nothing is gathered, and the next step may consume the
        state at once. `extras` go into the same commit: JSON, as the position of the data, and
        random keys. Another plan, another number of processes, or Orbax alone reads it. Raises
        ArgumentError where an array was consumed, CheckpointError where it cannot be written. A
        part of the state alone is saved, with a warning: it cannot be resumed from.
        """
        checkpoint = _checkpointing()
        arrays, _ = opened_state(state)
        plan = self.plan

        def plan_hash() -> str:
            return _hash_of(plan_to_json(plan))

        saved: bool = checkpoint.save(manager, number, arrays, extras or {}, plan_hash, force)
        planned = _state_paths(plan)
        missing: list[str] = checkpoint.left_out(arrays, planned) if saved else []
        if missing:
            LOGGER.warning(
                "%s: the checkpoint of step %d holds %d of the %d arrays of its state. %s are "
                "left out, and no training can be resumed without them: save the whole state, such "
                "as (model, optimizer).",
                self.__name__, number, len(planned) - len(missing), len(planned),
                _first_of(missing),
            )  # fmt: skip
        return saved

    def restore(self, manager: Any, wanted: Any, step: int | None = None) -> Restored | None:
        """The latest checkpoint of an Orbax CheckpointManager, or that after `step` steps.

        Its state lies as `wanted` says, which `abstract_state` gives: every device reads its own
        pieces. None where there is no checkpoint yet. Raises CheckpointError where one cannot be
        read, or is of another state.
        """
        arrays, closed = opened_state(wanted)
        plan = self._latest.plan if self._latest is not None else self._given
        planned = _state_paths(plan) if plan is not None else []
        found: Restored | None = _checkpointing().restore(manager, arrays, step, planned)
        return None if found is None else replace(found, state=closed(found.state))

    def _flat(self) -> BoundMesh:
        """The devices of the cluster in a row."""
        count = self._request.cluster.device_count
        flat = MeshShape.of((count,)) if count > 1 else MeshShape((), ())
        return bind_mesh(flat, range(count))

    def companion(
        self,
        fun: Callable[..., Any],
        *,
        weight: float = 0.0,
        like: Sequence[Any] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> ParallelStep[..., Any]:
        """Another function of the same state, such as an evaluation, on this step's mesh.

        It is planned at its first call, takes the state as this step's plan lays it out, so that
        nothing of it is moved, and does not consume it. The state may be one of its arguments, or
        a part of the state, such as `params`, may be. Of a step with stages it runs through these,
        forward only.

        With a `weight`, the times that it runs for each step, this step is planned for both, on
        arguments `like` those that the function will get: arrays or shapes. That must be said
        before this step has a plan, and counts where it is one program.

        Raises PlanError where this step is to be planned with it and has a plan already; the first
        call raises PlanError before this step has one, ArgumentError without any of the state.
        """
        step = step_of(fun, "companion")
        spec = StepSpec(
            step,
            argnums_of(static_argnums, "static_argnums", step),
            argnames_of(static_argnames, step),
        )
        asked = self._request
        request = Request(
            asked.cluster,
            asked.mesh,
            memory_bytes=asked.memory_bytes,
            rules=asked.rules,
            order=asked.order,
        )
        found: ParallelStep[..., Any] = ParallelStep(
            spec, request, donate=False, transport=self._transport, cache=self._cache, beside=self
        )
        if (share := weight_of(weight)) > 0:
            self._join(found, share, like)
        return found

    def _join(self, companion: ParallelStep[..., Any], weight: float, like: Sequence[Any]) -> None:
        """Let a companion count when this step is planned."""
        name = companion.__name__
        if self._planned or self._given is not None:
            raise PlanError(
                f"{self.__name__} has a plan already, so {name} cannot count in it: call "
                f"companion({name}, weight={weight:g}, like=...) before the first step"
            )
        if not like:
            raise ArgumentError(
                f"companion({name}, weight={weight:g}) needs like=(state, batch): the arguments "
                f"that {name} will be called with, as arrays or jax.ShapeDtypeStruct"
            )
        self._family.append((companion, weight, tuple(like)))

    def _members(self) -> tuple[Member, ...]:
        """The companions that count when this step is planned."""
        found: list[Member] = []
        for companion, weight, like in self._family:
            spec = companion.spec
            args, kwargs = unplaced(spec, like, {})
            traced = trace(spec, args, kwargs)
            found.append(Member(Source.of(spec, args, kwargs, traced, companion._request), weight))
        return tuple(found)

    def _wanted(self) -> Request:
        """The request to plan for; a companion's is beside the plan that its step has by now."""
        if self._beside is None:
            return self._request
        plan = self._beside.plan
        return replace(self._request, cluster=planned_cluster(plan), mesh=plan.mesh, beside=plan)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled object of the step: `.as_text()`, `.memory_analysis()`.

        Of stage programs a mapping: the name of each part, such as "F0", to its compiled object.
        """
        with self._turn:
            executor = self._run(read_call(self._spec, args, kwargs), wanted=True).executor
        programs = executor.compiled
        return next(iter(programs.values())) if executor.program.is_one_part else dict(programs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """The step lowered for its devices but not compiled, as `jax.jit(f).lower(...)` gives it.

        It has `.as_text()`, `.compile()`, `.cost_analysis()`. What it takes and gives are the flat
        arrays of the call. Of stage programs a mapping: the name of each part to its own.
        """
        with self._turn:
            planned = self._planned_for(read_call(self._spec, args, kwargs))
            return lowered_parts(
                planned.trace, planned.program, self._meshes(planned.plan), self._donate,
                planned.plan.compiler_options,
            )  # fmt: skip

    def rows_of(self, process: int) -> dict[str, Ranges]:
        """The rows (from, to) that a process must have of each batch argument, by its path.

        Whoever passes `autopar.OwnRows` brings these and no others. Raises PlanError before there
        is a plan.
        """
        planned = self._planned_latest()
        meshes = self._meshes(planned.plan)
        shapes = tuple(map(mesh_shape, meshes))
        return Interface(planned.trace, planned.program, shapes).rows_of(process, meshes)

    # -- layouts ---------------------------------------------------------------------------

    @property
    def mesh(self) -> BoundMesh:
        """The mesh that the step runs on, as JAX has it; raises PlanError before there is a plan.

        With stages there are several: see `meshes`.
        """
        mesh, *others = self.meshes
        if others:
            raise PlanError(
                f"{self.__name__} runs on {1 + len(others)} meshes, as its stages have devices of "
                f"their own: {self.__name__}.meshes has them all."
            )
        return mesh

    @property
    def meshes(self) -> tuple[BoundMesh, ...]:
        """The mesh of each submesh of the plan in use; raises PlanError before there is one."""
        return self._meshes(self.plan)

    @property
    def shardings(self) -> Shardings:
        """The shardings of the arguments and results of the latest call, as trees like theirs.

        `step.shardings.args[0]` are those of the state. Raises PlanError before there is a call or
        a plan for one.
        """
        planned = self._planned_latest()
        return step_shardings(
            planned.plan, planned.source.spec, planned.source.traced, planned.trace.whole,
            self._meshes(planned.plan),
        )  # fmt: skip

    def _planned_latest(self) -> Planned:
        """The latest step that was planned; raises PlanError before there is one."""
        if self._latest is None:
            raise PlanError(
                f"{self.__name__} has met no arguments yet: call it, or "
                f"{self.__name__}.plan_for(state, batch) with arrays or shapes."
            )
        return self._latest

    # -- planning --------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in use; raises PlanError before there is one."""
        if self._latest is not None:
            return self._latest.plan
        if self._given is not None:
            return self._given
        raise PlanError(
            f"{self._spec.name} has no plan yet: call it once, or {self._spec.name}.plan_for("
            "state, batch) with arrays or shapes."
        )

    def __repr__(self) -> str:
        """The step, what was asked for, and the plan in use."""
        if self._latest is None and self._given is None:
            request = self._request
            mesh = f" ({request.mesh})" if request.mesh is not None else ""
            return (
                f"<ParallelStep {self.__name__} on {request.cluster.name}{mesh}, {request.method}: "
                "no plan yet; call it, or its plan_for>"
            )
        plan = self.plan
        many = f"{len(plan.stages)} stages" if not plan.is_one_program else f"({plan.mesh})"
        p = plan.prediction
        return (
            f"<ParallelStep {self.__name__} on {plan.origin.cluster_name} {many}, "
            f"{plan.origin.method}: predicted {show_seconds(p.seconds)} a step, "
            f"{show_bytes(p.peak_bytes)} a device>"
        )

    def _repr_html_(self) -> str:
        """A card of the plan in use, for notebooks; the step's name before there is one."""
        if self._latest is None and self._given is None:
            return f"<pre>{escape(self._spec.name)}: no plan yet</pre>"
        return html_summary(self.plan)

    def plan_for(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Plan for these arguments, concrete or abstract, without running."""
        return self.planned(*args, **kwargs).plan

    def planned(self, /, *args: Any, **kwargs: Any) -> Planned:
        """The trace, graph, plan and program for these arguments."""
        return self.watched((), *args, **kwargs)

    def watched(self, watchers: Sequence[Watcher], /, *args: Any, **kwargs: Any) -> Planned:
        """The same, with watchers told of each pass as it ends."""
        return self._planned_for(read_call(self._spec, args, kwargs), watchers)

    def _planned_for(
        self, call: Call, watchers: Sequence[Watcher] = (), wanted: bool = True
    ) -> Planned:
        """The planned step for a call; of one that nobody `wanted` ahead the user may be told."""
        with self._turn:
            if call.signature not in self._planned:
                self._planned[call.signature] = self._make(call, watchers, wanted)
            self._latest = self._planned[call.signature]
            return self._latest

    def what_if(
        self, *, pins: Mapping[str, Any] | None = None, memory_gb: float | None = None
    ) -> Plan:
        """The plan that other pins, or another limit, would give for the latest arguments.

        The plan in use stays; nothing is traced again. Pins left out are none, and a limit left
        out is the one asked for before. Raises PinError, MemoryLimitError or InfeasibleError
        where there is no such plan, PlanError before there is any.
        """
        if self._latest is None:
            raise PlanError(f"{self._spec.name} has no plan yet: call it, or its plan_for, first.")
        limit = memory_bytes_of(memory_gb)
        limit = limit if limit is not None else self._request.memory_bytes
        with paused_collection():
            return replan(self._latest, pins_of(pins), limit).plan

    def verify(
        self,
        /,
        *args: Any,
        level: str = "memory",
        target: Cluster | str | None = None,
        steps: int = 3,
        devices: int | None = None,
        limit_seconds: float = 600.0,
        **kwargs: Any,
    ) -> Verification:
        """The plan for these arguments, arrays or shapes, beside the truth.

        Level "numerics" runs it and the plain step for some `steps` on virtual CPU devices, at most
        so many `devices`. "collectives" and "memory" ask the compiler of the cluster, or of another
        `target`, for which no device of it is needed; "full" has a TPU's generate code as well.
        Raises VerifyError where the compiler is not installed, or has no answer within the limit.
        """
        chosen = cluster_of(target) if target is not None else None
        inquiry = Inquiry(
            level_named(level),
            chosen,
            number_of(steps, "steps"),
            number_of(devices, "devices") if devices is not None else None,
            seconds_of(limit_seconds, "limit_seconds"),
        )
        call = read_call(self._spec, args, kwargs)
        called = Called(call.spec, call.args, call.kwargs)
        return verify_planned(self._planned_for(call), called, inquiry)

    def confirm_fit(
        self, /, *args: Any, limit_seconds: float = 600.0, **kwargs: Any
    ) -> ConfirmedFit:
        """The plan for these arguments, arrays or shapes, that the compiler confirms to fit.

        The cluster's compiler is asked ahead of time, with no device. Where a device would hold
        more than the limit, the step is planned again within less, a few times at most; the step
        runs by the plan that fits from then on. Raises MemoryLimitError where none is found,
        VerifyError where the compiler is not installed, has no answer in `limit_seconds`, or does
        not tell memory, and PlanError for a plan that was given, or in a job of several processes.
        """
        if self._given is not None:
            raise PlanError(
                f"{self.__name__} has a plan that was given, so none is made: verify() tells "
                "whether it fits"
            )
        if not this_job().is_alone:
            raise PlanError(
                f"{self.__name__} runs in {this_job().count} processes, which share one plan: "
                "confirm it before the job, with autopar plan --confirm-fit -o plan.json, and give "
                "it as plan='plan.json'"
            )
        call = read_call(self._spec, args, kwargs)
        called = Called(call.spec, call.args, call.kwargs)
        seconds = seconds_of(limit_seconds, "limit_seconds")
        inquiry = Inquiry(CheckLevel.MEMORY, limit_seconds=seconds)
        with self._turn, progress(self.__name__, "confirming that its plan fits") as told:
            planned = self._planned_for(call)

            def plan_within(limit_bytes: int) -> Planned:
                told.say(f"compiled, it does not fit: planning within {show_bytes(limit_bytes)}")
                request = replace(planned.request, memory_bytes=limit_bytes)
                with paused_collection():
                    return self._plan_step(planned.source, request, ())

            found = confirm_fit(planned, inquiry, called, plan_within)
            if found.planned is not planned:
                self._planned[call.signature] = self._latest = found.planned
                self._running.pop(call.signature, None)
            return found

    def under(self, plan: Plan) -> ParallelStep[P, R]:
        """The same step and options under a plan that was made before."""
        cluster = planned_cluster(a_plan(plan))
        request = replace(self._request, cluster=cluster)
        return ParallelStep(
            self._spec, request, self._donate, plan, self._transport, self._patience, self._cache
        )

    def _make(self, call: Call, watchers: Sequence[Watcher], wanted: bool) -> Planned:
        start = time.perf_counter()
        args, kwargs = unplaced(call.spec, call.args, call.kwargs)
        doing = "planning" if self._given is None else "reading its plan"
        with paused_collection(), progress(self.__name__, doing) as told:
            watchers = (*watchers, told.watcher)
            traced = trace(call.spec, args, kwargs)
            request = self._wanted()
            source = Source.of(call.spec, args, kwargs, traced, request)
            if (twin := self._twin(call, source, request)) is not None:
                told.say("it is the step that was planned before, with other objects of the kind")
                return twin
            if not wanted:
                self._tell_of_another_shape(call)
            source = replace(source, family=self._members())
            if request.beside is not None:
                source = with_shared_state(source, request.beside)
                self._tell_of_writing(call, source)
            graph = source.plain.graph
            warn_of_unknown(graph)
            for watcher in watchers:
                watcher.after("trace", self._spec, graph, time.perf_counter() - start)
            return self._agreed(source, request, watchers)

    def _twin(self, call: Call, source: Source, request: Request) -> Planned | None:
        """The step as it was planned with other objects, where all that it runs is the same.

        An optimizer or an activation that is made anew holds other functions, which may do the
        same: that is known once the step is traced.
        """
        for signature, planned in self._planned.items():
            traced = planned.source.traced
            if signature.settings != call.signature.settings:  # it may be lowered otherwise
                continue
            if planned.request.beside == request.beside and is_same_trace(traced, source.traced):
                state = {traced.input_paths[i] for i in traced.state_inputs}
                return replace(planned, source=source.with_state(state))
        return None

    def _agreed(self, source: Source, request: Request, watchers: Sequence[Watcher]) -> Planned:
        """The planned step, the same in every process of a job: process 0 plans for all.

        Raises JobError in each where two processes differ in what the plan rests on, or one does
        not come.
        """
        job, given = this_job(), self._given
        if job.is_alone:
            return restore(given, source) if given else self._plan_step(source, request, watchers)
        subject = f"the plan of {self.__name__}"
        text = plan_to_json(given) if given else ""
        job.agree(subject, device_facts() | self._facts(source, text))
        planned: list[Planned] = []

        def plan() -> str:
            planned.append(self._plan_step(source, request, watchers))
            return plan_to_json(planned[0].plan)

        if given is None:
            text = job.from_first(subject, plan)
        if planned:
            (found,) = planned
        else:
            found = restore(given or plan_from_json(text, subject), source)
        made = {"the hash of the plan": _hash_of(text), "the program": str(found.program)}
        job.agree(f"the program of {self.__name__}", made)
        return found

    def _plan_step(self, source: Source, request: Request, watchers: Sequence[Watcher]) -> Planned:
        """The planned step, out of the plan cache where there is one that has it."""
        if self._cache is None:
            return plan_step(source, request, watchers)
        return self._cache.planned(source, request, lambda: plan_step(source, request, watchers))

    def _facts(self, source: Source, given: str) -> dict[str, str]:
        """The facts that a plan rests on, in words that can be laid side by side."""
        graph = source.traced.graph
        arguments = ", ".join(f"{i.path} {i.value.type_text}" for i in graph.inputs)
        return {
            "autopar": version("autopar"),
            "the step": self.__name__,
            ARGUMENTS: arguments,
            "the hash of the traced step": source.traced.key,
            "the hash of the plan given": _hash_of(given) if given else "none",
            "the cluster": self._request.cluster.name,
            "the list of passes": str(self._request.passes),
            "the compiler options": options_text(self._request.compiler_options),
            "the transport": self._transport,
        }

    def _run(self, call: Call, wanted: bool = False) -> _Running:
        """The compiled step for a call; compiling one that nobody `wanted` ahead may be told of."""
        if call.signature not in self._running:
            cluster = self._request.cluster
            check_present(f"cluster {cluster.name}", cluster.device_count)
            planned = self._planned_for(call, wanted=wanted)
            self._running[call.signature] = self._started(planned, call)
        return self._running[call.signature]

    def _started(self, planned: Planned, call: Call) -> _Running:
        """A planned step with its programs: those of one that is the same, or new ones."""
        for running in self._running.values():
            if running.planned.programs is planned.programs:
                executor = running.executor.serving(planned.source.traced)
                return _Running(planned, executor, call.facts())
        with progress(self.__name__, "compiling") as told:
            executor = self._compiled(planned, told)
        return _Running(planned, executor, call.facts())

    def _tell_of_another_shape(self, call: Call) -> None:
        """Warn, once, of a call that plans and compiles anew, as the last batch of a set may."""
        if self._has_told or not self._running:
            return
        self._has_told = True
        signature, running = next(reversed(self._running.items()))
        before, now = running.facts, call.facts()
        types, constants = now.other_types(before), now.other_constants(before)
        settings = other_settings(call.signature.settings, signature.settings)
        found = [*types, *constants] or ["the structure of its arguments has changed"]
        remedy = (
            "What is no array is part of the step. Make such objects once and pass the same "
            "ones at every call; where they differ on purpose, as in training and evaluation, "
            "this is the price, once for each."
        )
        if types:
            remedy = (
                "Drop the last, partial batch or fill it up; or compile for each shape before the "
                f"loop, with {self.__name__}.compile(state, batch)."
            )
        elif settings and not constants:
            found = settings
            remedy = "Each set of JAX's settings takes a program of its own, as under jax.jit."
        LOGGER.warning(
            "%s",
            bulleted(
                f"{self.__name__} is called with other arguments than before, and "
                f"{'plans and ' if self._given is None else ''}compiles anew:",
                found,
                f"{remedy} This is said once; the log tells of later ones at INFO.",
            ),
        )

    def _tell_of_writing(self, call: Call, source: Source) -> None:
        """Warn of a companion that changes the state in place, as one may that is to read it."""
        traced = source.traced
        state = {traced.input_paths[i] for i in traced.state_inputs}
        held = {path.partition("/")[0] for path in state}
        found = [p for p in call.changes(traced) if p.partition("/")[0] in held]
        arrays = [p for p in found if p in state]
        modes = [p for p in found if p not in state]
        if arrays:
            LOGGER.warning(
                "%s runs beside a step and writes what both share: %s. Statistics and counts of "
                "random keys that training keeps have moved after it. To evaluate, call .eval() on "
                "the model before the call, and .train() after it.",
                self.__name__, _first_of(arrays),
            )  # fmt: skip
        if modes:
            LOGGER.warning(
                "%s sets %s, and the model is left so. Call .eval() and .train() outside of it: "
                "neither makes the step that trains plan again.",
                self.__name__, ", ".join(modes),
            )  # fmt: skip

    def _compiled(self, planned: Planned, told: Progress) -> Executor:
        meshes = self._meshes(planned.plan)
        transport = transport_for(self._transport, meshes, this_job())
        if not isinstance(transport, LocalTransport):
            told.say(f"compiling; arrays travel between processes by {transport.name}")
            if planned.programs.spmd is None:  # one program waits for nobody's list
                _check_waiting(planned.program, meshes, transport)
        platform = str(meshes[0].devices.flat[0].platform)
        if left_out := options_on(platform, planned.plan.compiler_options).left_out:
            told.say(f"the compiler for {platform.upper()} is not given {options_text(left_out)}")
        options = Options(
            donate=self._donate,
            patience=self._patience_for(planned.program),
            transport=transport,
            compiled=lambda done, parts: told.count(done, parts, "compiling"),
            compiler_options=planned.plan.compiler_options,
        )
        return Executor(planned.trace, planned.programs.lowered, meshes, options)

    def _patience_for(self, program: Program) -> float | None:
        """Seconds that a step may make no progress; None for any number."""
        if self._patience == "auto":
            return None if program.is_one_part else PATIENCE_SECONDS
        return self._patience

    def _meshes(self, plan: Plan) -> tuple[BoundMesh, ...]:
        """The meshes of a plan's submeshes on their devices, in the user's order if it has one."""
        return bind_plan(plan, self._request.order if plan.mesh == self._request.mesh else None)


def _check_waiting(
    program: Program, meshes: Sequence[BoundMesh], transport: AbstractTransport
) -> None:
    """Raise JobError unless no process of this job ever waits for one that waits for it."""
    host = host_of(meshes)
    own = walks(program, host.count, host.submeshes, transport.asks_all)
    limit = nearest_awaited(in_flight_limit(str(meshes[0].devices.flat[0].platform)))
    verify_projections(program, host.submeshes, own, Transports(transport.asks_all, limit))


def _first_of(paths: Sequence[str]) -> str:
    """The first of some paths, and the number of the others."""
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else paths[0]


def _state_paths(plan: Plan) -> list[str]:
    """The path of each leaf of a plan's state."""
    return [leaf.path for leaf in leaf_arguments(plan.state)]


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checkpointing() -> Any:
    """The module that writes and reads checkpoints; raises CheckpointError without Orbax."""
    try:
        return importlib.import_module("autopar.runtime.checkpoint")
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"checkpoints are written with Orbax, and {error.name} is not installed: "
            'pip install "autopar[checkpoint]"'
        ) from error
