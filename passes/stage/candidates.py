"""Candidates of the stage search: stages under a schedule, timed by a formula and by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.cluster.placement import Block, Link, link_between, place
from autopar.cost.stage import StageCost, peak_with, stage_times
from autopar.cost.timeline import Seconds
from autopar.passes.stage.dynamic import Interval
from autopar.passes.stage.interval_costs import IntervalCosts
from autopar.passes.stage.prices import Choice, ChosenStage, StageTable
from autopar.schedule.grid import Grid
from autopar.schedule.simulate import simulate
from autopar.schedule.table import SCHEDULES, in_flight, stage_devices


def chunks_of(schedule: str) -> int:
    """The number of stages that the search puts on each device of a schedule."""
    return SCHEDULES[schedule].usual_chunks


@dataclass(frozen=True)
class Candidate:
    """Stages in order under a schedule, in the submeshes of one family.

    `tight`: the stages were chosen for what this very schedule holds in flight.
    """

    table: StageTable
    costs: IntervalCosts
    family: int
    parts: tuple[Interval, ...]
    schedule: str
    tight: bool

    @property
    def microbatches(self) -> int:
        """m, microbatches of a step."""
        return self.costs.microbatches

    @property
    def chunks(self) -> int:
        """v, stages on each block of devices."""
        return chunks_of(self.schedule)

    @property
    def devices(self) -> int:
        """p, blocks of devices: what a schedule calls its devices."""
        return len(self.parts) // self.chunks

    @property
    def task_count(self) -> int:
        """The number of tasks of a simulation."""
        return (3 if self._splits else 2) * len(self.parts) * self.microbatches

    @cached_property
    def device_of(self) -> tuple[int, ...]:
        """The schedule's device of each stage."""
        return stage_devices(self.schedule, self.devices, self.chunks)

    @cached_property
    def sums(self) -> tuple[StageCost, ...]:
        """The cost of each stage, with the dispatch of F, I and, where it is a task, W."""
        task = Seconds(self.table.task_seconds)
        tasks = StageCost(task, task, task if self._splits else Seconds())
        sums = [self.costs.stage(part.option, part.first, part.last, tasks) for part in self.parts]
        return tuple(sums if self._splits else [cost.unsplit for cost in sums])

    @cached_property
    def pace_seconds(self) -> float:
        """Least seconds between two microbatches, w in `dynamic`.

        That is the slowest device or the busiest wire; or, by Little's law, the round trips from
        the stages of a device over the microbatches that its schedule has in flight there.
        """
        held = [0.0] * self.devices
        # Little's law: with k in flight on a round trip of T seconds, one ends every T / k at best.
        for trip, device in zip(self._trips, self.device_of, strict=True):
            held[device] += trip
        waits = [
            trip / count
            for trip, count in zip(held, self._flights, strict=True)
            if count < self.microbatches * self.chunks
        ]
        return max([*self._busy_seconds, self._busiest_wire, *waits])

    @cached_property
    def formula_seconds(self) -> float:
        """(m-1) pace + slowest device + gaps of the others / v + 2 * cuts.

        With one chunk a device (v = 1), and no weight gradients in the gaps, this is what the
        dynamic program minimises, but with the links that really lie between the blocks.
        """
        busy, costs = self._busy_seconds, self.costs
        bubble = SCHEDULES[self.schedule].bubble
        gaps, whole = [0.0] * self.devices, [0.0] * self.devices
        for part, device in zip(self.parts, self.device_of, strict=True):
            at = part.option, part.first, part.last
            whole[device] += float(costs.whole[at])
            waits = bubble.seconds(costs.whole[at], costs.forward[at], costs.weight[at])
            gaps[device] += float(waits)
        # The slowest device is never idle while it lasts; the others are waited for once a step.
        slowest = max(range(self.devices), key=busy.__getitem__)
        others = (sum(gaps) - gaps[slowest]) / self.chunks
        cuts = sum(2 * link.seconds(nbytes) for link, nbytes in self._wires)
        return (self.microbatches - 1) * self.pace_seconds + whole[slowest] + others + cuts

    @cached_property
    def formula_bytes(self) -> tuple[int, ...]:
        """The most bytes on one device of each block, if nothing leaves before its W."""
        flights = self._flights
        held = [0] * self.devices
        for sums, device in zip(self.sums, self.device_of, strict=True):
            held[device] = max(held[device], flights[device] * sums.activation_bytes)
        return self._on_devices(tuple(held))

    @property
    def least_bytes(self) -> tuple[int, ...]:
        """The least bytes that one device of each block may hold, found without its tasks.

        That is as if the most that are in flight were of its leanest stage, and about to end.
        """
        found: list[int] = []
        for device, flights in enumerate(self._flights):
            own = [s for s, d in zip(self.sums, self.device_of, strict=True) if d == device]
            ending = (min(s.kept_bytes, s.activation_bytes) for s in own)
            lasting = (s.activation_bytes for s in own)
            found.append(flights * min(ending if self._splits else lasting))
        return self._on_devices(tuple(found))

    def run_simulation(self, grid: Grid) -> tuple[float, tuple[int, ...]]:
        """Seconds of the step, and the most bytes on one device of each block.

        After its last task a device does what is done once a step. All microbatches but one queue
        for the busiest wire, which the simulator does not see.
        """
        sums = self.sums
        sends = [link.seconds(nbytes) for link, nbytes in self._wires]
        run = simulate(grid, stage_times(sums, sends))
        # Once-a-step work follows a device's last task, so it hides behind later devices.
        ends = [float(run.ends[row[-1]]) for row in grid.wiring.rows]
        for stage, device in zip(sums, self.device_of, strict=True):
            ends[device] += stage.once.total
        # The simulator knows no queues on wires: this bound does.
        queued = self._trips[0] + (self.microbatches - 1) * self._busiest_wire
        return max(*ends, queued), self._on_devices(run.peak_bytes)

    def simulated(self, grid: Grid) -> Choice:
        """The choice that it is, with what the simulation gives."""
        seconds, peaks = self.run_simulation(grid)
        return Choice(
            self.stages,
            self.microbatches,
            self.schedule,
            self.chunks,
            seconds,
            self.formula_seconds,
            peaks,
        )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The devices of each of the schedule's devices."""
        table, costs = self.table, self.costs
        firsts = self.parts[: self.devices]
        shapes = [table.submeshes[int(costs.submesh[part.option])] for part in firsts]
        return place(table.cluster, shapes)

    @property
    def stages(self) -> tuple[ChosenStage, ...]:
        """The stages as the answer has them."""
        options = self.costs.options
        return tuple(
            ChosenStage(
                part.first,
                part.last,
                self.blocks[device],
                options[part.option].mesh,
                options[part.option].remat,
                options[part.option].partial_sums,
            )
            for part, device in zip(self.parts, self.device_of, strict=True)
        )

    @property
    def _splits(self) -> bool:
        """True if I and W are tasks of their own."""
        return SCHEDULES[self.schedule].needs_split

    @cached_property
    def _flights(self) -> tuple[int, ...]:
        """The most microbatches in flight on each device, counted by chunk."""
        return in_flight(self.schedule, self.devices, self.microbatches, self.chunks)

    @cached_property
    def _busy_seconds(self) -> list[float]:
        """Seconds of each device for one microbatch, with a share of the work done once a step."""
        busy = [0.0] * self.devices
        for part, device in zip(self.parts, self.device_of, strict=True):
            busy[device] += float(self.costs.seconds[part.option, part.first, part.last])
        return busy

    @cached_property
    def _trips(self) -> list[float]:
        """From the start of each stage's F to the end of its I, if no microbatch is in the way."""
        trips: list[float] = []
        trip = 0.0
        cuts = [*(2 * link.seconds(nbytes) for link, nbytes in self._wires), 0.0]
        for sums, cut in reversed(list(zip(self.sums, cuts, strict=True))):
            trip += sums.forward.total + sums.input_gradient.total + cut
            trip += 0.0 if self._splits else sums.weight_gradient.total
            trips.append(trip)
        return trips[::-1]

    @cached_property
    def _busiest_wire(self) -> float:
        """The most seconds that one way of a link is busy for a microbatch."""
        return max((nbytes / link.bytes_per_second for link, nbytes in self._wires), default=0.0)

    @cached_property
    def _wires(self) -> list[tuple[Link, int]]:
        """Link and bytes of a microbatch behind each stage but the last."""
        devices, cut_bytes = self.device_of, self.costs.batch.cut_bytes
        return [
            (
                link_between(self.table.cluster, self.blocks[left], self.blocks[right]),
                cut_bytes[part.last] if left != right else 0,
            )
            for part, left, right in zip(self.parts, devices, devices[1:], strict=False)
        ]

    def _on_devices(self, held: tuple[int, ...]) -> tuple[int, ...]:
        """`held` by device, with what a device holds throughout and works in."""
        own: list[list[StageCost]] = [[] for _ in range(self.devices)]
        for sums, device in zip(self.sums, self.device_of, strict=True):
            own[device].append(sums)
        return tuple(map(peak_with, own, held))
