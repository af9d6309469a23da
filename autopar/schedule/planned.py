"""The schedule of a plan in time, from what the plan says that its stages take."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.schedule.simulate import Simulation, StageTimes, simulate
from autopar.schedule.table import make_grid


def simulation_of(plan: Plan) -> Simulation:
    """The loop over microbatches that the plan was chosen by; what comes once a step is after it.

    Raises ScheduleError where the plan's schedule cannot be made of its stages.
    """
    stages, launch = plan.stages, plan.prediction.launch_seconds
    times = StageTimes(
        forward=tuple(s.forward_seconds + launch for s in stages),
        input_gradient=tuple(s.input_gradient_seconds + launch for s in stages),
        weight_gradient=tuple(s.weight_gradient_seconds for s in stages),
        send_seconds=plan.prediction.send_seconds,
        activation_bytes=tuple(s.activation_bytes for s in stages),
        kept_bytes=tuple(s.kept_bytes for s in stages),
    )
    count = len(plan.submeshes)
    grid = make_grid(plan.schedule, count, plan.microbatches, len(stages) // count)
    return simulate(grid, times)


def once_seconds_of(plan: Plan) -> tuple[float, ...]:
    """Work of each submesh once a step, after its last microbatch: gradient sums and update."""
    once = [0.0] * len(plan.submeshes)
    for stage in plan.stages:
        once[stage.submesh] += stage.once_seconds
    return tuple(once)
