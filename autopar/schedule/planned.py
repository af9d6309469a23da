"""The loop of a step in time: of one that is being planned, and of a plan by what it says."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.plan import Plan
from autopar.schedule.simulate import Simulation, StageTimes, simulate
from autopar.schedule.table import make_grid, schedule_named


def simulate_loop(
    schedule: str, devices: int, microbatches: int, times: StageTimes, launch_seconds: float
) -> Simulation:
    """The loop over microbatches of stages on so many of a schedule's devices.

    To start a task takes `launch_seconds`: F, I and, where it is a task of its own, W. Raises
    ScheduleError where the schedule cannot be made of the stages.
    """
    splits = schedule_named(schedule).needs_split
    tasks = replace(
        times,
        forward=tuple(t + launch_seconds for t in times.forward),
        input_gradient=tuple(t + launch_seconds for t in times.input_gradient),
        weight_gradient=tuple(t + launch_seconds * splits for t in times.weight_gradient),
    )
    chunks = len(times.forward) // devices
    return simulate(make_grid(schedule, devices, microbatches, chunks), tasks)


def simulation_of(plan: Plan) -> Simulation:
    """The loop over microbatches that the plan was chosen by; what comes once a step is after it.

    Raises ScheduleError where the plan's schedule cannot be made of its stages.
    """
    stages, predicted = plan.stages, plan.prediction
    times = StageTimes(
        forward=tuple(s.forward_seconds for s in stages),
        input_gradient=tuple(s.input_gradient_seconds for s in stages),
        weight_gradient=tuple(s.weight_gradient_seconds for s in stages),
        send_seconds=predicted.send_seconds,
        activation_bytes=tuple(s.activation_bytes for s in stages),
        kept_bytes=tuple(s.kept_bytes for s in stages),
    )
    return simulate_loop(
        plan.schedule, len(plan.submeshes), plan.microbatches, times, predicted.launch_seconds
    )


def busiest_submesh(plan: Plan) -> int:
    """The submesh that works longest in a step: the plan's predicted traffic is its devices'."""
    if len(plan.submeshes) == 1:
        return 0
    works = zip(simulation_of(plan).busy_seconds, once_seconds_of(plan), strict=True)
    busy = [work + once for work, once in works]
    return max(range(len(busy)), key=lambda k: busy[k])


def once_seconds_of(plan: Plan) -> tuple[float, ...]:
    """Work of each submesh once a step, after its last microbatch: gradient sums and update."""
    once = [0.0] * len(plan.submeshes)
    for stage in plan.stages:
        once[stage.submesh] += stage.once_seconds
    return tuple(once)
