"""A step in time: the schedule of its stages simulated, then what each submesh does once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster.placement import link_between
from autopar.cost.stage import StageCost, stage_times
from autopar.ir.folded import NONE, FoldedProgram
from autopar.planner.placed_stages import PlacedStages
from autopar.schedule.planned import simulate_loop
from autopar.schedule.simulate import Simulation


@dataclass(frozen=True)
class StepTiming:
    """A step in time. One that is one program has no schedule to simulate: it runs once."""

    simulation: Simulation | None
    once_seconds: tuple[float, ...]  # by submesh
    launch_seconds: float  # what starting a part takes
    tick_seconds: float | None = None  # of all ticks, where stages are one program
    flying: tuple[int, ...] = ()  # microbatches in flight, where stages are one program

    @property
    def seconds(self) -> float:
        """Until the last submesh has updated its state."""
        if self.tick_seconds is not None:  # nobody goes on before all are done
            return self.tick_seconds + max(self.once_seconds)
        loops = self.simulation.spans if self.simulation is not None else ()
        ends = [spans[-1].end_seconds for spans in loops] or [0.0]
        return max(end + once for end, once in zip(ends, self.once_seconds, strict=True))

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each submesh works."""
        loops = self.simulation.busy_seconds if self.simulation is not None else (0.0,)
        return tuple(work + once for work, once in zip(loops, self.once_seconds, strict=True))

    @property
    def work_seconds(self) -> float:
        """Seconds that the busiest submesh works: these stages take no less."""
        return max(self.busy_seconds)

    @property
    def bubble_seconds(self) -> float:
        """Seconds that the idlest submesh waits."""
        return self.seconds - min(self.busy_seconds)

    @property
    def send_seconds(self) -> tuple[float, ...]:
        """Seconds that a transfer from each stage to the next takes."""
        return self.simulation.times.send_seconds if self.simulation is not None else ()

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches whose activations each submesh holds."""
        if self.flying:
            return self.flying
        return self.simulation.peak_in_flight if self.simulation is not None else (1,)


def time_folded(timing: StepTiming, folded: FoldedProgram) -> StepTiming:
    """The time of the same stages as one program: a tick takes as long as its slowest submesh.

    What is passed on at the end of a tick is waited for.
    """
    assert timing.simulation is not None
    times, launch = timing.simulation.times, timing.launch_seconds
    forward = [t - launch for t in times.forward]
    inward = [t - launch for t in times.input_gradient]
    backward = [a + b for a, b in zip(inward, times.weight_gradient, strict=True)]
    send = max(times.send_seconds, default=0.0)
    total = 0.0
    for loop in folded.loops:
        first, second = loop.turns
        for a, b in zip(first.ticks, second.ticks, strict=True):
            busy = 0.0
            for s in range(len(a)):
                both = len(second.parts[s]) > 1
                seconds = (forward[s] if a[s] != NONE else 0.0) + (
                    backward[s] + forward[s] * both if b[s] != NONE else 0.0
                )
                busy = max(busy, seconds)
            total += busy + send * (any(lane for lane in first.lanes) and max(a) != NONE)
            total += send * (any(lane for lane in second.lanes) and max(b) != NONE)
    return replace(timing, tick_seconds=total, flying=folded.peak_in_flight)


def time_step(placed: PlacedStages, costs: Sequence[StageCost]) -> StepTiming:
    """The step's time by the costs of its stages."""
    stages, contexts = placed.stages, placed.contexts
    count = len(contexts)
    once = [0.0] * count
    for stage, cost in zip(stages.stages, costs, strict=True):
        once[stage.submesh] += cost.once.total
    if stages.is_one_program:
        return StepTiming(None, tuple(once), 0.0)
    launch = placed.cluster.chip.launch_seconds
    layers = stages.layers.layers
    sends = tuple(
        link_between(placed.cluster, contexts[a.submesh].block, contexts[b.submesh].block).seconds(
            layers[a.last].cut_bytes
        )
        if a.submesh != b.submesh
        else 0.0
        for a, b in zip(stages.stages[:-1], stages.stages[1:], strict=True)
    )
    times = stage_times(costs, sends)
    loop = simulate_loop(stages.schedule, count, stages.microbatches, times, launch)
    return StepTiming(loop, tuple(once), launch)
