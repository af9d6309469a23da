"""Schedules with whole backward tasks, which drain the pipeline at the end of each step.

Legend: p devices, m microbatches, v chunks, g microbatches a group (p if p divides m); device d
holds stages d, p+d, 2p+d, ...; F and B are the seconds of a forward and a backward of a device. In
the pictures every task takes one slot: F3 is of microbatch 3, F5.3 also says that it is of stage 5.

    name          forwards before the first backward    peak in flight on d       bubble
    gpipe         m                                     m                         (p-1)(F+B)
    1f1b          p-d                                   p-d                       (p-1)(F+B)
    eager-1f1b    2(p-1-d) + 1                          2(p-1-d) + 1              (p-1)(F+B)
    interleaved   (v-1)g + 2(p-1-d) + 1                 (v-1)g + 2(p-1-d) + 1     (p-1)(F+B)/v
    looped-bfs    mv                                    mv                        (p-1)(F+B)/v

None is more than the mv forwards that there are. With transfers of c seconds the bubbles of gpipe
and eager-1f1b grow by 2c(p-1), while the pipeline fills and drains; that of 1f1b, which waits in
every microbatch, grows by 2c((p-1)(1+m/p)-1) where p divides m. Last come schedules that overlap
nothing: what the pipelined ones are compared with, and forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.schedule.grid import Kind, Task
from autopar.schedule.order import group_size, in_turn


def breadth_first(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """Runs all forwards chunk by chunk, then all backwards: gpipe with one chunk, else looped-bfs.

    Huang et al. 2019 (GPipe); Lamy-Poirier 2023. Backwards keep the order of the microbatches, so
    that gradients are added in it. p=3 m=4 v=1
        device 0 | F0 F1 F2 F3 ··········· B0 B1 B2 B3
        device 1 | ·· F0 F1 F2 F3 ····· B0 B1 B2 B3 ··
        device 2 | ····· F0 F1 F2 F3 B0 B1 B2 B3 ·····
    p=2 m=2 v=2
        device 0 | F0.0 F0.1 F2.0 F2.1 ········· B2.0 B2.1 B0.0 B0.1
        device 1 | ···· F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1 ····
    """
    stages = range(d, p * v, p)
    for stage in stages:
        yield from (Task(Kind.FORWARD, stage, i) for i in range(m))
    for stage in reversed(stages):
        yield from (Task(Kind.BACKWARD, stage, i) for i in range(m))


def one_forward_one_backward(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """Each backward as early as it can be, so that device d keeps p-d microbatches, not m: 1f1b.

    Narayanan et al. 2019 (PipeDream), with a flush. p=3 m=4 v=1
        device 0 | F0 F1 F2 ····· B0 F3 B1 ·· B2 ·· B3
        device 1 | ·· F0 F1 ·· B0 F2 B1 F3 B2 ·· B3 ··
        device 2 | ····· F0 B0 F1 B1 F2 B2 F3 B3 ·····
    """
    return in_turn(p, m, v, d, p - 1 - d, Kind.BACKWARD)


def interleaved(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """Groups of g microbatches pass through all chunks; with one chunk it is eager-1f1b.

    Narayanan et al. 2021 (Megatron-LM); Zhuang et al. 2023 (eager 1F1B). Each device runs two
    forwards ahead of the next one and not one, so that transfers are hidden. p=3 m=4 v=1
        device 0 | F0 F1 F2 F3 ·· B0 ·· B1 ·· B2 ·· B3
        device 1 | ·· F0 F1 F2 B0 F3 B1 ·· B2 ·· B3 ··
        device 2 | ····· F0 B0 F1 B1 F2 B2 F3 B3 ·····
    p=2 m=2 v=2
        device 0 | F0.0 F0.1 F2.0 F2.1 ···· B2.0 ···· B2.1 B0.0 B0.1
        device 1 | ···· F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 ····
    """
    warmup = (v - 1) * group_size(p, m) + 2 * (p - 1 - d)
    return in_turn(p, m, v, d, warmup, Kind.BACKWARD)


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
