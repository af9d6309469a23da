"""A train step for a whole mesh: it plans, compiles and runs; here the two wings meet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, device_order
from autopar.collection import paused_collection
from autopar.errors import PlanError
from autopar.frontend import StepSpec, read_call, trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.text_file import write_text
from autopar.ir.verification import Verification
from autopar.passes.base import Watcher
from autopar.planning import Planned, graph_of, plan_step, planned_before, replan_any
from autopar.progress import progress
from autopar.request import Request, memory_bytes_of, pins_of
from autopar.runtime.bind import BoundMesh, bind_mesh
from autopar.runtime.executor import Executor
from autopar.runtime.pipeline import PipelineExecutor, PipelineOptions
from autopar.runtime.state import create_on_submeshes, create_planned, create_spread
from autopar.runtime.timeline import Timeline, chrome_trace
from autopar.schedule.simulate import Simulation
from autopar.staging.plan import PlannedStages, stages_before
from autopar.staging.source import Source
from autopar.verifying.shrink import Called
from autopar.verifying.verify import Inquiry, level_named, verify_planned


@dataclass(frozen=True)
class Recording:
    """A step of stage programs as it was measured, and as the plan had it."""

    measured: Timeline
    predicted: Simulation

    def __str__(self) -> str:
        return f"{self.measured}\n{self.predicted}"


class ParallelStep:
    """A train step for a whole mesh, called exactly like the plain one.

    The first call with new argument types plans (unless a plan was given), compiles and runs.
    """

    def __init__(
        self, spec: StepSpec, request: Request, donate: bool, plan: Plan | None = None
    ) -> None:
        self._spec, self._request, self._donate = spec, request, donate
        self._given = plan
        self._planned: dict[Hashable, Planned | PlannedStages] = {}
        self._executors: dict[Hashable, Executor | PipelineExecutor] = {}
        self._latest: Planned | PlannedStages | None = None
        self._trace_path: Path | None = None
        self._recording: Recording | None = None
        self.__name__ = spec.name
        self.__wrapped__ = spec.fun

    @property
    def spec(self) -> StepSpec:
        """The plain step and how it is called: parallelizing a ParallelStep starts from it."""
        return self._spec

    # -- running ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. State that comes back is donated: use the returned one from then on."""
        call = read_call(self._spec, args, kwargs)
        executor = self._executors.get(call.signature)
        if executor is None:
            executor = self._executor(args, kwargs)
        self._latest = self._planned[call.signature]
        if self._trace_path is not None:
            return self._recorded(executor, call.leaves)
        return executor(call.leaves)

    def trace(self, path: str | Path) -> None:
        """Measure the next step of stage programs and write its spans to `path`.

        The file has Chrome's trace form (chrome://tracing, Perfetto); `recording` then holds the
        measured grid beside the predicted one.
        """
        self._trace_path = Path(path)

    @property
    def recording(self) -> Recording:
        """The step that was measured last; raises PlanError before there is one."""
        if self._recording is None:
            raise PlanError(f"no step was measured yet: {self.__name__}.trace('t.json'), then step")
        return self._recording

    def _recorded(self, executor: Executor | PipelineExecutor, leaves: Sequence[Any]) -> Any:
        path, self._trace_path = self._trace_path, None
        planned = self._latest
        if isinstance(executor, Executor) or not isinstance(planned, PlannedStages):
            raise PlanError(
                f"{self.__name__} is one program, which jax.profiler.trace measures; "
                "trace() is for stages or microbatches"
            )
        result, measured = executor.run_traced(leaves)
        self._recording = Recording(measured, planned.timing.simulation)
        write_text(json.dumps(chrome_trace(measured)), path or Path("trace.json"))
        return result

    def init(self, create_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The state that `create_state(*args)` makes, every leaf born on its devices.

        Before there is a plan, leaves are cut up evenly over all devices and the first step
        moves them once.
        """
        plan = self._latest.plan if self._latest is not None else self._given
        if plan is not None and plan.pipeline is not None:
            return create_on_submeshes(create_state, args, kwargs, plan.arguments, _submeshes(plan))
        if plan is not None:
            return create_planned(create_state, args, kwargs, plan, self._bound(plan))
        count = self._request.cluster.device_count
        flat = MeshShape.of((count,)) if count > 1 else MeshShape((), ())
        return create_spread(create_state, args, kwargs, bind_mesh(flat, range(count)))

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled object of the step: `.as_text()`, `.memory_analysis()`.

        Of stage programs a mapping: the name of each part, such as "F0", to its compiled object.
        """
        executor = self._executor(args, kwargs)
        return executor.compile()

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

    def plan_for(self, *args: Any, watchers: Sequence[Watcher] = (), **kwargs: Any) -> Plan:
        """Plan for these arguments, concrete or abstract, without running."""
        return self.planned(*args, watchers=watchers, **kwargs).plan

    def planned(
        self, *args: Any, watchers: Sequence[Watcher] = (), **kwargs: Any
    ) -> Planned | PlannedStages:
        """The trace, graph, plan and program for these arguments."""
        key = read_call(self._spec, args, kwargs).signature
        if key not in self._planned:
            self._planned[key] = self._make(args, kwargs, watchers)
        self._latest = self._planned[key]
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
            return replan_any(self._latest, pins_of(pins), limit).plan

    def verify(
        self,
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
        chosen = Cluster.parse(target) if target is not None else None
        inquiry = Inquiry(level_named(level), chosen, steps, devices, limit_seconds)
        planned = self.planned(*args, **kwargs)
        return verify_planned(planned, Called(self._spec, args, kwargs), inquiry)

    def under(self, plan: Plan) -> ParallelStep:
        """The same step and options under a plan that was made before."""
        cluster = Cluster.from_toml_text(plan.origin.cluster, "the plan's cluster")
        request = replace(self._request, cluster=cluster)
        return ParallelStep(self._spec, request, self._donate, plan)

    def _make(
        self, args: Sequence[Any], kwargs: dict[str, Any], watchers: Sequence[Watcher]
    ) -> Planned | PlannedStages:
        start = time.perf_counter()
        with (
            paused_collection(),
            progress(self.__name__, "planning", has_line=not watchers) as told,
        ):
            watchers = (*watchers, told.watcher)
            traced = trace(self._spec, args, kwargs)
            graph = graph_of(traced, self._request.rules)
            for watcher in watchers:
                watcher.after("trace", self._spec, graph, time.perf_counter() - start)
            source = Source.of(self._spec, args, kwargs, traced, self._request)
            if self._given is None:
                return plan_step(graph, self._request, source, watchers)
            if self._given.pipeline is not None:
                return stages_before(self._given, source, self._request.rules)
            return planned_before(self._given, traced, graph, self._request.rules)

    def _executor(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Executor | PipelineExecutor:
        key = read_call(self._spec, args, kwargs).signature
        if key not in self._executors:
            planned = self.planned(*args, **kwargs)
            with progress(self.__name__, "compiling"):
                executor = self._compiled(planned)
                executor.compile()
            self._executors[key] = executor
        return self._executors[key]

    def _compiled(self, planned: Planned | PlannedStages) -> Executor | PipelineExecutor:
        if isinstance(planned, Planned):
            mesh = self._bound(planned.plan)
            return Executor(planned.traced, planned.program, mesh, self._donate)
        staged = planned.staged
        options = PipelineOptions(donate=self._donate)
        return PipelineExecutor(
            staged.sliced.trace, staged.program, _submeshes(planned.plan), options
        )

    def _bound(self, plan: Plan) -> BoundMesh:
        cluster = Cluster.from_toml_text(plan.origin.cluster, "the plan's cluster")
        return bind_mesh(plan.mesh, device_order(cluster, plan.mesh))


def _submeshes(plan: Plan) -> tuple[BoundMesh, ...]:
    """The meshes of a plan's submeshes on their devices."""
    pipeline = plan.pipeline
    return tuple(bind_mesh(s.mesh, s.devices) for s in pipeline.submeshes) if pipeline else ()
