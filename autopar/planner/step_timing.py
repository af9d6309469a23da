"""When stages run: their schedule simulated by what each takes, then what comes once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cluster.submesh import Block, link_between
from autopar.ir.stages import StagePlan
from autopar.planner.stage_costs import StageCosts
from autopar.schedule.simulate import Simulation, StageTimes, simulate
from autopar.schedule.table import make_grid


@dataclass(frozen=True)
class Timing:
    """A simulated step: the schedule, then what each submesh does once."""

    simulation: Simulation
    once_seconds: tuple[float, ...]  # by submesh
    launch_seconds: float  # what starting a part takes

    @property
    def seconds(self) -> float:
        """Until the last submesh has updated its state."""
        ends = (spans[-1].end_seconds for spans in self.simulation.spans)
        return max(end + once for end, once in zip(ends, self.once_seconds, strict=True))

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """How long each submesh works."""
        busy = zip(self.simulation.busy_seconds, self.once_seconds, strict=True)
        return tuple(work + once for work, once in busy)

    @property
    def work_seconds(self) -> float:
        """How long the submesh that works longest works: these stages take no less."""
        return max(self.busy_seconds)

    @property
    def bubble_seconds(self) -> float:
        """How long the submesh that waits longest waits."""
        return self.seconds - min(self.busy_seconds)


def timing_of(
    stages: StagePlan, costs: Sequence[StageCosts], blocks: Sequence[Block], cluster: Cluster
) -> Timing:
    """The step's time by the costs of its stages."""
    launch = cluster.chip.launch_seconds
    layers = stages.layers.layers
    sends = tuple(
        link_between(cluster, blocks[a.submesh], blocks[b.submesh]).seconds(
            layers[a.last].cut_bytes
        )
        if a.submesh != b.submesh
        else 0.0
        for a, b in zip(stages.stages[:-1], stages.stages[1:], strict=True)
    )
    times = StageTimes(
        forward=tuple(c.forward.total + launch for c in costs),
        input_gradient=tuple(c.input_gradient.total + launch for c in costs),
        weight_gradient=tuple(c.weight_gradient.total for c in costs),
        send_seconds=sends,
        activation_bytes=tuple(c.activation_bytes for c in costs),
        kept_bytes=tuple(c.kept_bytes for c in costs),
    )
    count = len(stages.submeshes)
    grid = make_grid(stages.schedule, count, stages.microbatches, stages.chunks)
    once = [0.0] * count
    for stage, cost in zip(stages.stages, costs, strict=True):
        once[stage.submesh] += cost.once.total
    return Timing(simulate(grid, times), tuple(once), launch)
