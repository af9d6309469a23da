"""Schedules that overlap nothing: what the pipelined ones are compared with, and forward alone.

Legend: p devices, m microbatches, v chunks; device d holds stages d, p+d, 2p+d, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.schedule.task import Kind, Task


def serial(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """The plain loop: one microbatch goes through all stages and back before the next starts.

    p=3 m=2 v=1
        device 0 | F0 ··········· B0 F1 ··········· B1
        device 1 | ·· F0 ····· B0 ····· F1 ····· B1 ··
        device 2 | ····· F0 B0 ··········· F1 B1 ·····
    """
    return one_by_one(range(d, p * v, p), m, (Kind.BACKWARD,))


def serial_split(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """The plain loop with its backward in two tasks.

    p=3 m=2 v=1
        device 0 | F0 ··········· I0 W0 F1 ··········· I1 W1
        device 1 | ·· F0 ····· I0 W0 ····· F1 ····· I1 W1 ··
        device 2 | ····· F0 I0 W0 ··········· F1 I1 W1 ·····
    """
    return one_by_one(range(d, p * v, p), m, (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT))


def one_by_one(stages: Sequence[int], m: int, backward: Sequence[Kind]) -> Iterator[Task]:
    """The plain loop on a device that holds those stages, given in the order of the model."""
    for i in range(m):
        yield from (Task(Kind.FORWARD, stage, i) for stage in stages)
        yield from (Task(kind, stage, i) for stage in reversed(stages) for kind in backward)


def forward_only(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """Forwards alone, in groups of p microbatches that pass through all chunks: no backward.

    p=2 m=4 v=2
        device 0 | F0.0 F0.1 F2.0 F2.1 F0.2 F0.3 F2.2 F2.3 ····
        device 1 | ···· F1.0 F1.1 F3.0 F3.1 F1.2 F1.3 F3.2 F3.3
    """
    for first in range(0, m, p):
        for stage in range(d, p * v, p):
            yield from (Task(Kind.FORWARD, stage, i) for i in range(first, min(first + p, m)))
