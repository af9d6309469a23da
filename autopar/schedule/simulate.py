"""Simulation of a grid: when each task runs, the bubbles, and what is held in memory.

A task starts once its device is free and what it reads has arrived. Transfers are asynchronous:
they delay the reader and keep no device busy. So the times are found in one pass over the tasks, in
an order in which they can run:

    start(t) = max(end of the task before t on its device, end(a) + transfer(a, t))
    end(t)   = start(t) + seconds(t)                   a: the task that t awaits, if any
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ScheduleError
from autopar.ir.text import show_bytes
from autopar.schedule.grid import KINDS, Grid, Kind, Task, Wiring
from autopar.schedule.picture import Box, Picture
from autopar.schedule.times import StageTimes as StageTimes

Numbers = NDArray[np.float64]

# From so many tasks on the half second that numba takes to be there is soon saved: a pass over
# them takes 5 ms without it and 0.2 ms with it.
_MANY_TASKS = 20_000


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of a task."""

    task: Task
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """A grid in time; task t of the grid's wiring runs from `starts[t]` to `ends[t]`, in seconds.

    A device's makespan bubble is all of the step that it does not work; its span bubble is only
    what lies between its own first and last task. Peaks are by device.
    """

    grid: Grid
    times: StageTimes
    starts: Numbers = field(repr=False)
    ends: Numbers = field(repr=False)

    @cached_property
    def makespan_seconds(self) -> float:
        """From the start of the first task to the end of the last."""
        return float(self.ends.max())

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each device works."""
        wiring, devices = self.grid.wiring, self.grid.device_count
        busy = np.bincount(wiring.device, _durations(self.grid, self.times), devices)
        return tuple(map(float, busy))

    @property
    def makespan_bubbles(self) -> tuple[float, ...]:
        """Seconds that each device does not work."""
        return tuple(_idle(self.makespan_seconds, busy) for busy in self.busy_seconds)

    @property
    def span_bubbles(self) -> tuple[float, ...]:
        """Seconds that each device waits between its first and its last task."""
        rows = self.grid.wiring.rows
        spans = [float(self.ends[row[-1]] - self.starts[row[0]]) for row in rows]
        return tuple(map(_idle, spans, self.busy_seconds))

    @property
    def makespan_bubble(self) -> float:
        """The longest that a device does not work."""
        return max(self.makespan_bubbles)

    @property
    def span_bubble(self) -> float:
        """The longest that a device waits between its first and its last task."""
        return max(self.span_bubbles)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each device the most microbatches that it keeps for the backward pass, by chunk."""
        return self.grid.peak_in_flight

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each device the most bytes of activations that it holds at one time."""
        held = _held_bytes(self.grid, self.times)[self.grid.wiring.work]
        return tuple(int(held[row].cumsum().max()) for row in self.grid.wiring.rows)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Start and end of each task of each device."""
        return tuple(
            tuple(map(Span, tasks, self.starts[row].tolist(), self.ends[row].tolist()))
            for tasks, row in zip(self.grid.rows, self.grid.wiring.rows, strict=True)
        )

    @property
    def picture(self) -> Picture:
        """The spans as boxes along the axis of time."""
        return Picture(
            tuple(
                tuple(
                    Box(self.grid.label(s.task), s.task.kind.value, s.start_seconds, s.end_seconds)
                    for s in spans
                )
                for spans in self.spans
            )
        )

    def __str__(self) -> str:
        grid = self.grid
        peaks = ", ".join(map(str, self.peak_in_flight))
        headline = (
            f"grid {grid.name}  p={grid.device_count} m={grid.microbatches} v={grid.chunks}  "
            f"makespan {self.makespan_seconds:.6g} s  bubble {self.makespan_bubble:.6g} s, "
            f"{self.span_bubble:.6g} s within a device's span"
        )
        lines = [headline, *self.picture.lines(), f"in flight at most: {peaks}"]
        if self.times.activation_bytes:
            lines.append(f"held at most: {', '.join(map(show_bytes, self.peak_bytes))}")
        return "\n".join(lines)


def simulate(grid: Grid, times: StageTimes) -> Simulation:
    """Runs a grid whose stages cost that much.

    Raises ScheduleError where the costs are of another number of stages, or the grid cannot run.
    """
    wiring = grid.wiring
    if times.stage_count != grid.stage_count:
        raise ScheduleError(
            f"{grid.name} has {grid.stage_count} stages, but the times are of {times.stage_count}"
        )
    if wiring.stuck:
        raise ScheduleError(f"{grid.name} cannot run: nothing leads to {wiring.stuck[0]}")
    durations = _durations(grid, times)
    delays = _transfers(grid, times)[wiring.work]
    starts = _starts(wiring, durations, delays, grid.device_count)
    return Simulation(grid, times, starts=starts, ends=starts + durations)


def _idle(span: float, busy: float) -> float:
    """The part of a span that is no work; what only rounding leaves is nothing."""
    return span - busy if span - busy > 1e-12 * span else 0.0


def _durations(grid: Grid, times: StageTimes) -> Numbers:
    seconds = {
        Kind.FORWARD: times.forward,
        Kind.BACKWARD: map(sum, zip(times.input_gradient, times.weight_gradient, strict=True)),
        Kind.INPUT_GRADIENT: times.input_gradient,
        Kind.WEIGHT_GRADIENT: times.weight_gradient,
    }
    table = [cost for kind in KINDS for cost in seconds[kind]]
    return np.array(table, np.float64)[grid.wiring.work]


def _transfers(grid: Grid, times: StageTimes) -> Numbers:
    """Seconds that what a task of each kind and stage reads from another stage is under way."""
    stages, boundaries = grid.stage_count, grid.stage_count - 1
    crosses = np.not_equal(grid.device_of[1:], grid.device_of[:-1])
    send = np.array(times.send_seconds or (0.0,) * boundaries, np.float64) * crosses
    back = np.array(times.return_seconds, np.float64) * crosses if times.return_seconds else send
    table = np.zeros((len(KINDS), stages))
    table[KINDS.index(Kind.FORWARD), 1:] = send
    table[KINDS.index(Kind.BACKWARD), :-1] = back
    table[KINDS.index(Kind.INPUT_GRADIENT), :-1] = back
    return table.ravel()


def _held_bytes(grid: Grid, times: StageTimes) -> NDArray[np.int64]:
    """Bytes that a task of each kind and stage adds to those held: none if none is a backward."""
    none = (0,) * grid.stage_count
    activations = np.array(times.activation_bytes or none, np.int64)
    kept = np.array(times.kept_bytes or none, np.int64)
    added = {
        Kind.FORWARD: activations * (len(grid.kinds) > 1),
        Kind.BACKWARD: -activations,
        Kind.INPUT_GRADIENT: kept - activations,
        Kind.WEIGHT_GRADIENT: -kept,
    }
    return np.concatenate([added[kind] for kind in KINDS])


def _starts(wiring: Wiring, durations: Numbers, delays: Numbers, device_count: int) -> Numbers:
    """The start of each task."""
    device, awaits = wiring.device, wiring.awaits
    starts, free = np.zeros_like(durations), np.zeros(device_count)
    if device.size >= _MANY_TASKS:
        _machine_code()(device, awaits, durations, delays, free, starts)
        return starts
    # Lists are read far faster than arrays, one by one.
    found: list[float] = starts.tolist()
    _run(
        device.tolist(), awaits.tolist(), durations.tolist(), delays.tolist(), free.tolist(), found
    )
    return np.array(found)


def _run(
    device: list[int], awaits: list[int], durations: list[float], delays: list[float],
    free: list[float], starts: list[float],
) -> None:  # fmt: skip
    """Fills in when each task starts; `free` is when each device has done what it began."""
    # Each task comes after the one that it awaits, so that one pass does.
    for t in range(len(device)):
        start = free[device[t]]
        a = awaits[t]
        if a >= 0:
            arrival = starts[a] + durations[a] + delays[t]
            if arrival > start:
                start = arrival
        starts[t] = start
        free[device[t]] = start + durations[t]


@cache
def _machine_code() -> Callable[..., None]:
    """The same pass compiled; numba is imported only where there is much to do."""
    import numba

    compiler = cast(Callable[..., Callable[..., Callable[..., None]]], numba.njit)
    return compiler(cache=True)(_run)
