"""The laws that every grid obeys, whatever made it, and the plain loop that each must equal.

1. Each stage is on one device, and runs each kind of task once for every microbatch.
2. A backward comes after the forward of its stage, a weight gradient after the input gradient.
3. Each stage takes the microbatches in order, kind by kind: gradients are then added in the same
   order as in the plain loop, which makes the two equal bit for bit.
4. What one stage sends another is read in the order in which it is sent.
5. What a device keeps for the backward pass is given back, and not before it is there.
6. The devices' orders fit together: no task waits for one that waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from autopar.schedule.flush import one_by_one
from autopar.schedule.grid import Grid, Kind, Task, awaited_stage

F, B, I, W = Kind  # noqa: E741
_SHAPES = ((F,), (F, B), (F, I, W))
_NEEDS = {B: F, I: F, W: I}  # of its own stage

# The microbatches of each kind of task of each stage, in the order in which its device runs them.
Runs = dict[tuple[Kind, int], list[int]]


def faults(grid: Grid) -> list[str]:
    """The ways in which a grid breaks a law, and where.

    With 2 microbatches, what a row makes it say:

        F0.0 B0.0 F0.1 B0.1 F0.1    F0.1 runs 2 times
        F0.0 F0.1 B0.0              B0.1 does not run; device 0 still keeps 1 of its forwards ...
        B0.0 F0.0 F0.1 B0.1         B0.0 runs before F0.0, which it needs
        F0.1 F0.0 B0.0 B0.1         stage 0 runs F0.1 before F0.0
    """
    if meaningless := list(_shape_faults(grid)):
        return meaningless
    runs: Runs = {(kind, s): [] for kind in grid.kinds for s in range(grid.stage_count)}
    for task in grid.tasks():
        runs[task.kind, task.stage].append(task.microbatch)
    return [
        *_task_faults(grid),
        *_turn_faults(grid),
        *_microbatch_faults(runs),
        *_channel_faults(grid, runs),
        *_flight_faults(grid),
        *_deadlocks(grid),
    ]


def plain_loop(grid: Grid) -> Grid:
    """The loop over microbatches that the grid must equal bit for bit, on the same devices."""
    stages: list[list[int]] = [[] for _ in grid.rows]
    for stage, device in enumerate(grid.device_of):
        stages[device].append(stage)
    rows = (one_by_one(held, grid.microbatches, grid.kinds[1:]) for held in stages)
    return Grid(
        name="serial-split" if grid.splits_backward else "serial",
        microbatches=grid.microbatches,
        device_of=grid.device_of,
        rows=tuple(tuple(row) for row in rows),
    )


def _shape_faults(grid: Grid) -> Iterator[str]:
    """Faults that make every other question meaningless."""
    if grid.kinds not in _SHAPES:
        kinds = " ".join(kind.value for kind in grid.kinds)
        yield f"its tasks are of the kinds {kinds!r}, not F, F and B, or F, I and W"
    for stage, device in enumerate(grid.device_of):
        if not 0 <= device < grid.device_count:
            yield f"stage {stage} is on device {device}, of {grid.device_count}"
    for task in grid.tasks():
        if not 0 <= task.stage < grid.stage_count:
            yield f"{task} is of a stage that there is not, of {grid.stage_count}"
        if not 0 <= task.microbatch < grid.microbatches:
            yield f"{task} is of a microbatch that there is not, of {grid.microbatches}"


def _task_faults(grid: Grid) -> Iterator[str]:
    """Law 1: tasks that are missing, run again, or run where their stage is not."""
    times = Counter(grid.tasks())
    for kind in grid.kinds:
        for stage in range(grid.stage_count):
            for microbatch in range(grid.microbatches):
                task = Task(kind, stage, microbatch)
                if times[task] != 1:
                    often = f"runs {times[task]} times" if times[task] else "does not run"
                    yield f"{task} {often}"
    for device, row in enumerate(grid.rows):
        for task in row:
            if grid.device_of[task.stage] != device:
                home = grid.device_of[task.stage]
                yield f"{task} runs on device {device}, but its stage is on device {home}"


def _turn_faults(grid: Grid) -> Iterator[str]:
    """Law 2: tasks that run before what they need of their own stage."""
    for row in grid.rows:
        done: set[Task] = set()
        present = set(row)
        for task in row:
            done.add(task)
            if task.kind not in _NEEDS:
                continue
            needed = Task(_NEEDS[task.kind], task.stage, task.microbatch)
            if needed in present and needed not in done:
                yield f"{task} runs before {needed}, which it needs"


def _microbatch_faults(runs: Runs) -> Iterator[str]:
    """Law 3: stages that take microbatches out of their order."""
    for (kind, stage), order in runs.items():
        for first, then in pairwise(order):
            if first > then:
                tasks = Task(kind, stage, first), Task(kind, stage, then)
                yield f"stage {stage} runs {tasks[0]} before {tasks[1]}"


def _channel_faults(grid: Grid, runs: Runs) -> Iterator[str]:
    """Law 4: stages that do not read in the order in which the stage before them sends."""
    for (kind, stage), reads in runs.items():
        sender = awaited_stage(kind, stage, grid.stage_count)
        if sender is None or grid.device_of[sender] == grid.device_of[stage]:
            continue
        for sent, read in zip(runs[kind, sender], reads, strict=False):
            if sent != read:
                tasks = Task(kind, sender, sent), Task(kind, sender, read)
                yield f"stage {sender} sends {tasks[0]} where stage {stage} reads {tasks[1]}"
                break


def _flight_faults(grid: Grid) -> Iterator[str]:
    """Law 5: devices that give back what they do not keep, or keep something for ever."""
    if grid.kinds == (F,):
        return
    for device, row in enumerate(grid.rows):
        kept = 0
        for task in row:
            kept += (task.kind is F) - (task.kind in (B, W))
            if kept < 0:
                yield f"device {device} gives back at {task} what it does not keep"
                break
        if kept > 0:
            yield f"device {device} still keeps {kept} of its forwards at the end"


def _deadlocks(grid: Grid) -> Iterator[str]:
    """Law 6: tasks that wait for ever."""
    for task in grid.wiring.stuck:
        stage = awaited_stage(task.kind, task.stage, grid.stage_count)
        if stage is not None:
            needed = Task(task.kind, stage, task.microbatch)
            home = grid.device_of[task.stage]
            yield f"device {home} waits for ever: {task} reads {needed}, which never runs"
