"""The schedules by name: what each needs, allows and keeps in flight, and their grids.

Legend: p devices, m microbatches, v chunks, g microbatches a group, d a device.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ScheduleError
from autopar.schedule.flush import (
    breadth_first,
    forward_only,
    interleaved,
    one_forward_one_backward,
    serial,
    serial_split,
)
from autopar.schedule.grid import Grid, Task
from autopar.schedule.order import group_size, groups_evenly
from autopar.schedule.zero_bubble import handcrafted_1, handcrafted_2, vee

Floats = NDArray[np.float64]
# The tasks of device d in order, and the most it keeps in flight, both from p, m, v and d.
RowMaker = Callable[[int, int, int, int], Iterator[Task]]
PeakFormula = Callable[[int, int, int, int], int]


class Bubble(StrEnum):
    """The wait of the slowest device for each of the others, once a step.

    F, I and W are a device's forward and the halves of its backward. Its F has to pass before the
    last device can begin, and I and W after the last has ended, but for what W fills.
    """

    WHOLE = "F + I + W"  # all of a microbatch
    DRAIN = "F + I - W"  # weight gradients fill what they can while the pipeline drains
    FILL = "F"  # and while it drains no device waits at all

    def seconds(self, whole: Floats, forward: Floats, weight: Floats) -> Floats:
        """The wait for each of some devices that take `whole`, with their F and W."""
        if self is Bubble.WHOLE:
            return whole
        if self is Bubble.FILL:
            return forward
        drained: Floats = np.maximum(whole - 2 * weight, 0.0)
        return drained


@dataclass(frozen=True)
class Schedule:
    """The facts of a schedule: the only place that names it, but for its generator.

    `chunks` are the fewest and the most stages that a device may hold, None for any number, and
    `usual_chunks` what it is used with. The loop placement puts stages d, p+d, 2p+d, ... on device
    d, the V placement stages d and 2p-1-d. `needs_split` asks for input and weight gradients as
    tasks of their own; `allows_barrier` says that all forwards end before any backward begins.
    One that `is_plain_loop` overlaps nothing: others are compared with it, and no search tries it.
    `even_groups` asks with several chunks that m // p groups come out even. From `filling(p)`
    microbatches on more of them leave the bubbles as they are; with fewer there is more waiting.
    """

    name: str
    sentence: str
    row: RowMaker
    peak: PeakFormula
    bubble: Bubble
    filling: Callable[[int], int] = lambda p: 1
    placement: Literal["loop", "V"] = "loop"
    chunks: tuple[int, int | None] = (1, 1)
    usual_chunks: int = 1
    needs_split: bool = False
    has_backward: bool = True
    allows_barrier: bool = False
    even_groups: bool = False
    is_plain_loop: bool = False


_ALL = (
    Schedule(
        "gpipe",
        "All forwards, then all backwards: simple, and every microbatch is kept.",
        breadth_first,
        lambda p, m, v, d: m,
        Bubble.WHOLE,
        allows_barrier=True,
    ),
    Schedule(
        "1f1b",
        "Each backward as early as it can be, so that few microbatches are kept.",
        one_forward_one_backward,
        lambda p, m, v, d: min(m, p - d),
        Bubble.WHOLE,
    ),
    Schedule(
        "eager-1f1b",
        "1f1b that runs further ahead, so that slow transfers are hidden.",
        interleaved,
        lambda p, m, v, d: min(m, 2 * (p - d) - 1),
        Bubble.WHOLE,
    ),
    Schedule(
        "interleaved",
        "1f1b over several chunks a device: its bubble is divided by their number.",
        interleaved,
        lambda p, m, v, d: min(m * v, (v - 1) * group_size(p, m) + 2 * (p - d) - 1),
        Bubble.WHOLE,
        lambda p: p,
        chunks=(1, None),
        usual_chunks=2,
        even_groups=True,
    ),
    Schedule(
        "looped-bfs",
        "gpipe over several chunks a device, one chunk after the other.",
        breadth_first,
        lambda p, m, v, d: m * v,
        Bubble.WHOLE,
        lambda p: p,
        chunks=(1, None),
        usual_chunks=2,
        allows_barrier=True,
    ),
    Schedule(
        "zb-h1",
        "1f1b whose weight gradients fill the gaps: about a third of its bubble.",
        handcrafted_1,
        lambda p, m, v, d: min(m, p),
        Bubble.DRAIN,
        lambda p: p,
        needs_split=True,
    ),
    Schedule(
        "zb-h2",
        "No device waits once it has begun, for nearly twice the memory.",
        handcrafted_2,
        lambda p, m, v, d: min(m, 2 * p - 1),
        Bubble.FILL,
        lambda p: 2 * p - 1,
        needs_split=True,
    ),
    Schedule(
        "zb-v",
        "No device waits once it has begun, in 1f1b's memory: two chunks a device, placed as a V.",
        vee,
        lambda p, m, v, d: min(2 * m, m + 1 + d, 2 * p),
        Bubble.FILL,
        lambda p: 2 * p - 1,
        placement="V",
        chunks=(2, 2),
        usual_chunks=2,
        needs_split=True,
    ),
    Schedule(
        "zb-interleaved",
        "zb-h1 over several chunks a device: its bubble is divided by their number.",
        handcrafted_1,
        lambda p, m, v, d: min(m * v, (v - 1) * group_size(p, m) + p),
        Bubble.DRAIN,
        lambda p: p,
        chunks=(1, None),
        usual_chunks=2,
        needs_split=True,
        even_groups=True,
    ),
    Schedule(
        "serial",
        "The plain loop: one microbatch after the other through all stages and back.",
        serial,
        lambda p, m, v, d: v,
        Bubble.WHOLE,
        chunks=(1, None),
        is_plain_loop=True,
    ),
    Schedule(
        "serial-split",
        "The plain loop with input and weight gradients as tasks of their own.",
        serial_split,
        lambda p, m, v, d: v,
        Bubble.WHOLE,
        chunks=(1, None),
        needs_split=True,
        is_plain_loop=True,
    ),
    Schedule(
        "forward-only",
        "Every forward and no backward, as in evaluation.",
        forward_only,
        lambda p, m, v, d: 0,
        Bubble.WHOLE,
        chunks=(1, None),
        has_backward=False,
    ),
)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType({s.name: s for s in _ALL})


def schedule_named(name: str) -> Schedule:
    """The schedule of that name; raises ScheduleError that lists the names there are."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=2)
        close = f" Close: {', '.join(near)}." if near else ""
        raise ScheduleError(
            f"no schedule is called {name!r}.{close} Schedules: {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]


def finest_schedule(barrier: bool) -> Schedule:
    """The schedule that takes a step apart into the most tasks, with one chunk a device.

    With a `barrier`, which the step is exact under, no backward runs before the last forward.
    """
    able = [
        s
        for s in SCHEDULES.values()
        if s.has_backward and s.chunks[0] == 1 and (s.allows_barrier or not barrier)
    ]
    return next((s for s in able if s.needs_split), able[0])


def make_grid(name: str, devices: int, microbatches: int, chunks: int = 1) -> Grid:
    """The tasks of every device in order.

    Raises ScheduleError where the name is unknown or the schedule does not allow these numbers.
    """
    schedule = schedule_named(name)
    check_numbers(schedule, devices, microbatches, chunks)
    rows = (schedule.row(devices, microbatches, chunks, d) for d in range(devices))
    return Grid(
        name=name,
        microbatches=microbatches,
        device_of=stage_devices(name, devices, chunks),
        rows=tuple(tuple(row) for row in rows),
    )


def stage_devices(name: str, devices: int, chunks: int) -> tuple[int, ...]:
    """The device of each stage."""
    if schedule_named(name).placement == "V":
        return (*range(devices), *reversed(range(devices)))
    return tuple(range(devices)) * chunks


def in_flight(name: str, devices: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """For each device the most microbatches that it keeps for the backward pass, by chunk.

    A closed formula: equal to the grid's own `peak_in_flight`, which is counted.
    """
    peak = schedule_named(name).peak
    return tuple(peak(devices, microbatches, chunks, d) for d in range(devices))


def check_numbers(schedule: Schedule, p: int, m: int, v: int) -> None:
    """Raise ScheduleError unless a schedule allows p devices, m microbatches and v chunks."""
    if p < 1 or m < 1:
        raise ScheduleError(
            f"{schedule.name} on {p} devices with {m} microbatches: take at least one of each"
        )
    least, most = schedule.chunks
    if v < least or (most is not None and v > most):
        rule = f"needs {most} chunks a device"
        if most is None:
            rule = f"needs at least {least} chunk a device"
        elif most == 1:
            chunked = ", ".join(s.name for s in SCHEDULES.values() if s.usual_chunks > 1)
            rule = f"has 1 chunk a device (more chunks: {chunked})"
        raise ScheduleError(f"{schedule.name} {rule}, not {v}")
    if v > 1 and schedule.even_groups and not groups_evenly(p, m):
        raise ScheduleError(
            f"{schedule.name} on {p} devices: {m} microbatches do not make {m // p} equal groups; "
            f"take {_even(p, m, -1)} or {_even(p, m, 1)} microbatches, or one chunk"
        )


def _even(p: int, m: int, step: int) -> int:
    while not groups_evenly(p, m):
        m += step
    return m
