"""The tasks that each task waits for, and an order in which all of them can run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.task import Kind, Task

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
