"""The grid of a pipeline schedule: the tasks of each device, in order.

A task is a kind of work, of one stage, for one microbatch. It waits for others; there is an order
in which all of them can run, or the grid is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ScheduleError as ScheduleError
from autopar.schedule.picture import Box, Picture


class Kind(StrEnum):
    """The part of its stage that a task computes.

    A BACKWARD is an INPUT_GRADIENT and a WEIGHT_GRADIENT in one: a grid has either it or those two.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, order=True, slots=True)
class Task:
    """A kind of work of one stage for one microbatch; prints as F2.0, stage before microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


Rows = tuple[tuple[Task, ...], ...]
Indices = NDArray[np.int64]

KINDS = tuple(Kind)


@dataclass(frozen=True, eq=False)
class Wiring:
    """The tasks of a grid as arrays, numbered so that each comes after all that it waits for.

    Of task t: `device[t]` runs it; `work[t]` = rank of its kind * stages + its stage; `awaits[t]`
    is the task of a neighbouring stage whose result it reads, or -1. `rows[d]` are the tasks of
    device d in its own order. `stuck` are the tasks that a device waits to run for ever: the grid
    can run only if there are none.
    """

    device: Indices
    work: Indices
    awaits: Indices
    rows: tuple[Indices, ...]
    stuck: tuple[Task, ...]


def awaited_stage(kind: Kind, stage: int, stage_count: int) -> int | None:
    """The stage whose task of the same kind and microbatch a task reads, if there is one.

    Of its own stage a task needs only what its device has done before it.
    """
    if kind is Kind.FORWARD:
        return stage - 1 if stage > 0 else None
    if kind is Kind.WEIGHT_GRADIENT or stage >= stage_count - 1:
        return None
    return stage + 1


def wire(rows: Rows, stage_count: int) -> Wiring:
    """Lets each device run on until it must wait, and wakes it when what it waits for is done.

    Every task is looked at twice at most: when its turn has come, and when it is woken.
    """
    stride = 1 + max((task.microbatch for row in rows for task in row), default=0)
    coded = [_coded(row, stage_count, stride) for row in rows]
    number: dict[int, int] = {}  # of the task of a code, once it has run
    met: list[list[int]] = [[] for _ in rows]
    ran: list[int] = []
    device_of: list[int] = []
    awaits: list[int] = []
    asleep: dict[int, list[int]] = {}
    awake = list(range(len(rows)))[::-1]
    while awake:
        # The device runs on from where it stopped, task by task ...
        device = awake.pop()
        done = met[device]
        codes, needs = coded[device]
        for k in range(len(done), len(codes)):
            # ... until one awaits a task that has not run: it sleeps until that one runs.
            awaited = number.get(needs[k], -1)
            if awaited < 0 <= needs[k]:
                asleep.setdefault(needs[k], []).append(device)
                break
            done.append(len(ran))
            number[codes[k]] = len(ran)
            ran.append(codes[k])
            device_of.append(device)
            awaits.append(awaited)
            # A task that has run wakes the devices that slept for it.
            if codes[k] in asleep:
                awake += asleep.pop(codes[k])
    # Devices that still sleep when none is awake wait for each other: they are stuck.
    return Wiring(
        device=np.array(device_of, np.int64),
        work=np.array(ran, np.int64) // stride,
        awaits=np.array(awaits, np.int64),
        rows=tuple(np.array(numbers, np.int64) for numbers in met),
        stuck=tuple(
            row[len(done)] for row, done in zip(rows, met, strict=True) if row[len(done) :]
        ),
    )


def _coded(row: tuple[Task, ...], stage_count: int, stride: int) -> tuple[list[int], list[int]]:
    """Each task as one number, and the number of the task that it awaits, or -1.

    A task's number is (rank of its kind * stages + stage) * stride + microbatch.
    """
    base = {kind: rank * stage_count for rank, kind in enumerate(KINDS)}
    codes = [(base[task.kind] + task.stage) * stride + task.microbatch for task in row]
    ahead = {
        (kind, stage): -1 if awaited is None else (base[kind] + awaited) * stride
        for kind in KINDS
        for stage in {task.stage for task in row}
        for awaited in (awaited_stage(kind, stage, stage_count),)
    }
    starts = [ahead[task.kind, task.stage] for task in row]
    needs = [
        -1 if start < 0 else start + task.microbatch
        for start, task in zip(starts, row, strict=True)
    ]
    return codes, needs


@dataclass(frozen=True)
class Grid:
    """A schedule made for some devices and microbatches: the tasks of each device in order.

    A device is a whole submesh here. `device_of` gives the device of each stage; with v chunks a
    device holds v stages.
    """

    name: str
    microbatches: int
    device_of: tuple[int, ...]
    rows: tuple[tuple[Task, ...], ...]

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return len(self.rows)

    @property
    def stage_count(self) -> int:
        """Number of stages: devices times chunks."""
        return len(self.device_of)

    @property
    def chunks(self) -> int:
        """Number of stages that a device holds."""
        return self.stage_count // self.device_count

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of task that occur, in the order in which a microbatch meets them."""
        found = {task.kind for task in self.tasks()}
        return tuple(kind for kind in Kind if kind in found)

    @property
    def splits_backward(self) -> bool:
        """True if input and weight gradients are tasks of their own."""
        return Kind.INPUT_GRADIENT in self.kinds

    @cached_property
    def wiring(self) -> Wiring:
        """The same tasks numbered in an order in which they can run, with what each waits for."""
        return wire(self.rows, self.stage_count)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each device the most microbatches that it keeps for the backward pass, by chunk.

        From the start of a forward to the end of its backward, or of its weight gradient.
        """
        if self.kinds == (Kind.FORWARD,):
            return (0,) * self.device_count
        peaks: list[int] = []
        for row in self.rows:
            kept = most = 0
            for task in row:
                if task.kind is Kind.FORWARD:
                    kept += 1
                    most = max(most, kept)
                elif task.kind is not Kind.INPUT_GRADIENT:
                    kept -= 1
            peaks.append(most)
        return tuple(peaks)

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """The slot in which each task of each device starts, if every task takes one.

        slot(task) = max(slot in which its device is free, slot of the task that it awaits + 1).
        With no gaps if the grid cannot run.
        """
        wiring = self.wiring
        if wiring.stuck:
            return tuple(tuple(range(len(row))) for row in self.rows)
        devices: list[int] = wiring.device.tolist()
        awaits: list[int] = wiring.awaits.tolist()
        free = [0] * self.device_count
        slots: list[int] = []
        for device, awaited in zip(devices, awaits, strict=True):
            slot = max(free[device], slots[awaited] + 1 if awaited >= 0 else 0)
            slots.append(slot)
            free[device] = slot + 1
        rows: list[list[int]] = [numbers.tolist() for numbers in wiring.rows]
        return tuple(tuple(slots[t] for t in numbers) for numbers in rows)

    def tasks(self) -> Iterator[Task]:
        """The tasks, device by device."""
        for row in self.rows:
            yield from row

    def label(self, task: Task) -> str:
        """The label of a task in a picture: F3 where the row says the stage, else F5.3."""
        return f"{task.kind.value}{task.microbatch}" if self.chunks == 1 else str(task)

    def __str__(self) -> str:
        """The picture in which every task takes one slot."""
        boxes = tuple(
            tuple(
                Box(self.label(task), task.kind.value, slot, slot + 1)
                for task, slot in zip(row, starts, strict=True)
            )
            for row, starts in zip(self.rows, self.slots, strict=True)
        )
        headline = f"grid {self.name}  p={self.device_count} m={self.microbatches} v={self.chunks}"
        return "\n".join([headline, *Picture(boxes).lines()])
