"""Verifies a plan at a level: its numbers beside the plain step's, or its figures beside XLA's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cluster.planned import planned_cluster
from autopar.cluster.target import Target
from autopar.errors import ArgumentError, VerifyError
from autopar.frontend import read_call
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.compiled import CheckLevel, Compiled
from autopar.ir.compiler_options import CompilerOptions, options_on, options_text
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.projection import walks
from autopar.ir.spmd_program import SpmdProgram
from autopar.ir.verification import CompiledPart, Verification
from autopar.passes.lower.projections import Transports, verify_projections
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.runtime.aot.program import AotProgram
from autopar.runtime.validation.numerics import STEPS, Validation, numerics
from autopar.runtime.validation.remote import remote_step
from autopar.runtime.validation.steps import (
    CpuProgram,
    FlatStep,
    check_host_memory,
    plain_step,
    planned_step,
    runs_here,
)
from autopar.verifying.figures import Judge
from autopar.verifying.programs import export_whole, programs_of
from autopar.verifying.shrink import Called, shrunk

# A program, exported when it is asked for, the level and the seconds to what became of it.
Compile = Callable[[Callable[[], AotProgram], CheckLevel, float], Compiled]

# A planned step that runs in other processes, while this lasts; and a note on where.
Elsewhere = tuple[AbstractContextManager[FlatStep], str]

_CPU_NOTE = (
    "XLA on CPU fuses less, widens narrow floats and has no timeline: its peak decides nothing, "
    "and bytes of narrow floats may differ. A target such as {count}xh100 asks a GPU's compiler"
)


_NOT_COMPARED = (
    "the collectives of one program of all stages are not compared: each is in the branch of its "
    "own stage. With lower=mpmd the same stages are, part by part; level memory compares the peak"
)


def compile_program(
    export: Callable[[], AotProgram], level: CheckLevel, limit_seconds: float
) -> Compiled:
    """Compile for the program's target; raises VerifyError as its compiler does."""
    return compile_ahead(export(), level, limit_seconds)


@dataclass(frozen=True)
class Inquiry:
    """A question about a plan.

    `target` is another cluster to compile for than the plan's own. Numbers are compared over so
    many `steps`, on at most `devices` where that is given; `elsewhere` runs the planned step where
    this process does not. A compiler gets `limit_seconds` for each program.
    """

    level: CheckLevel = CheckLevel.MEMORY
    target: Cluster | None = None
    steps: int = STEPS
    devices: int | None = None
    limit_seconds: float = 600.0
    compile: Compile = compile_program
    elsewhere: Elsewhere | None = None


def level_named(name: str | CheckLevel) -> CheckLevel:
    """The level of a name; raises ArgumentError for no such name."""
    try:
        return CheckLevel(name)
    except ValueError:
        raise ArgumentError(
            f"there is no level {name!r}; write {', '.join(level.value for level in CheckLevel)}"
        ) from None


def verify_planned(planned: Planned, called: Called, inquiry: Inquiry) -> Verification:
    """Verify a plan at a level.

    Raises VerifyError where that cannot be done here: a compiler is missing or gave no answer, or
    there are too few CPU devices.
    """
    origin = planned.plan.origin
    level, notes = inquiry.level, _waiting(planned)
    if level is CheckLevel.NUMERICS:
        notes += _left_out(planned.plan, "cpu")
        _check_memory(planned.plan, inquiry.devices)
        with _validation(planned, called, inquiry.devices, inquiry.elsewhere) as validation:
            found = numerics(validation, inquiry.steps)
        return Verification(origin.step, origin.cluster_name, level, numerics=found, notes=notes)
    cluster = _target_cluster(planned, inquiry)
    target = Target.of(cluster)
    if planned.programs.spmd is not None:
        if level is CheckLevel.COLLECTIVES:
            raise VerifyError(_NOT_COMPARED)
        notes += (_NOT_COMPARED,)
    parts = tuple(_parts(planned, cluster, target, inquiry))
    notes += _left_out(planned.plan, target.platform)
    is_cpu = target.platform == "cpu"
    if is_cpu:
        notes += (_CPU_NOTE.format(count=planned.plan.device_count),)
    return Verification(origin.step, origin.cluster_name, level, str(target), None, parts, notes)


def _left_out(plan: Plan, platform: str) -> tuple[str, ...]:
    """A note on the plan's compiler options that another platform's compiler does not get."""
    left_out = options_on(platform, plan.compiler_options).left_out
    if not left_out:
        return ()
    return (f"the compiler for {platform.upper()} is not given {options_text(left_out)}",)


def _waiting(planned: Planned) -> tuple[str, ...]:
    """A note that the processes of the plan's cluster, one a host, never wait in a circle.

    Raises JobError where they do.
    """
    cluster, program = planned_cluster(planned.plan), planned.program
    if cluster.hosts == 1 or program.is_one_part:
        return ()
    layout = cluster.topology.layout()
    hosts = [layout.host_of(d) for d in range(cluster.device_count)]
    number = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    submeshes = [
        frozenset(number[hosts[d]] for d in s.devices or range(cluster.device_count))
        for s in program.submeshes
    ]
    for asks_all in (False, True):
        own = walks(program, len(number), submeshes, asks_all)
        verify_projections(program, submeshes, own, Transports(asks_all))
    return (
        f"{len(number)} processes, one a host, walk {len(program.instructions)} instructions in "
        "one order: none waits for another that waits for it",
    )


# -- numerics ----------------------------------------------------------------------------------


def _check_memory(plan: Plan, devices: int | None) -> None:
    """Raise VerifyError where both runs would not fit this machine.

    The devices hold what they are planned to; the plain step and the copies of arguments and
    results on the host come to some four times the arguments.
    """
    whole = sum(a.value.nbytes for a in plan.arguments)
    count = min(plan.device_count, devices or plan.device_count)
    check_host_memory(plan.prediction.peak_bytes * count + 4 * whole)


@contextmanager
def _validation(
    planned: Planned, called: Called, devices: int | None, elsewhere: Elsewhere | None
) -> Generator[Validation]:
    trace, program = planned.trace, planned.program
    plain, notes = planned.source.traced, tuple[str, ...]()
    if devices is not None and devices < planned.plan.device_count:
        if not program.is_one_part:
            raise VerifyError(
                f"a plan of stages runs on its own {planned.plan.device_count} devices, not on "
                f"{devices}: its submeshes are not shrunk. Plan the same stages for a smaller "
                "cluster to compare them."
            )
        small = shrunk(planned, called, devices)
        called, plain, notes = small.called, small.plain, (small.note,)
        trace, program = MicrobatchTrace.of_whole(small.traced), small.program
    meshes = [s.mesh for s in program.submeshes]
    spmd = planned.programs.spmd
    options = planned.plan.compiler_options
    running: AbstractContextManager[FlatStep] = _on_cpu(trace, spmd or program, options)
    if elsewhere is not None:
        running, note = elsewhere
        notes = (*notes, note)
    with running as step:
        yield Validation(
            plain,
            read_call(called.spec, called.args, called.kwargs).leaves,
            plain_step(called.spec, called.args, called.kwargs),
            step,
            str(meshes[0])
            if program.is_one_part
            else ", ".join(f"mesh{i} ({mesh})" for i, mesh in enumerate(meshes)),
            sum(mesh.device_count for mesh in meshes),
            notes,
        )


@contextmanager
def _on_cpu(
    trace: MicrobatchTrace, lowered: Program | SpmdProgram, options: CompilerOptions
) -> Generator[FlatStep]:
    """The planned step on this process's CPU devices, or one program on those of another one."""
    program = lowered.program if isinstance(lowered, SpmdProgram) else lowered
    count = sum(s.mesh.device_count for s in program.submeshes)
    if not program.is_one_part or runs_here(count):
        yield planned_step(trace, lowered, options)
        return
    cpus = Cluster.parse(f"{count}xcpu")
    exported = export_whole(trace, program, cpus, donate=False, options=options)
    with remote_step(exported, trace.whole.constants) as step:
        yield step


# -- compilers ---------------------------------------------------------------------------------


def _target_cluster(planned: Planned, inquiry: Inquiry) -> Cluster:
    """The cluster to compile for; raises ArgumentError where it has other numbers of devices."""
    plan = planned.plan
    if inquiry.target is None:
        return planned_cluster(plan)
    if inquiry.target.device_count != plan.device_count:
        raise ArgumentError(
            f"target {inquiry.target.name} has {inquiry.target.device_count} devices and the plan "
            f"is for {plan.device_count}"
        )
    return inquiry.target


def _parts(
    planned: Planned, cluster: Cluster, target: Target, inquiry: Inquiry
) -> Iterator[CompiledPart]:
    judge = Judge(inquiry.level, target.platform, cluster.memory_bytes)
    for program in programs_of(planned, cluster, target):
        export = program.export
        if isinstance(export, CpuProgram):
            compiled = export.compiled()
        else:
            compiled = inquiry.compile(export, inquiry.level, inquiry.limit_seconds)
        yield judge.part(program, compiled)
