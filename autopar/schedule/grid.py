"""The grid of a pipeline schedule: the tasks of each device, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import ScheduleError as ScheduleError
from autopar.schedule.picture import Box, Picture
from autopar.schedule.task import Kind as Kind
from autopar.schedule.task import Task as Task
from autopar.schedule.wiring import Wiring, wire


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
