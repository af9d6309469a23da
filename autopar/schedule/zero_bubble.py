"""Schedules that split the backward: weight gradients wait to fill what would be bubbles.

Legend: p devices, m microbatches, v chunks, g microbatches a group (p if p divides m); F, I and W
are the seconds of a forward, an input gradient and a weight gradient of a device. In the pictures
every task takes one slot: F3 is of microbatch 3, F5.3 also says that it is of stage 5.

    name             placement   peak in flight, each device   bubble of the step
    zb-h1            loop        p                             (p-1)(F+I-W)
    zb-h2            loop        2p-1                          (p-1) max(F, F+I-2W)
    zb-interleaved   loop        (v-1)g + p                    (p-1)(F+I-W)/v
    zb-v             V           2p chunks of half a device    (p-1)F/2 if F=I=W

The bubbles hold from m=p on, for zb-h2 and zb-v from 2p-1. Of zb-h2's and zb-v's none lies between
a device's own first and last task where F=I=W. No peak exceeds the mv forwards that there are.

Qi et al. 2023 (zero bubble pipeline parallelism), Qi et al. 2024 (controllable memory).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from autopar.schedule.grid import Kind, Task
from autopar.schedule.order import group_size, in_groups, in_turn


def handcrafted_1(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """1f1b whose weight gradients fill the gaps: zb-h1, and with more chunks zb-interleaved.

    p=3 m=4 v=1
        device 0 | F0 F1 F2 ····· I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1 | ·· F0 F1 ·· I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2 | ····· F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    p=2 m=2 v=2
        device 0 | F0.0 F0.1 F2.0 F2.1 ···· I2.0 W2.0 I2.1 W2.1 I0.0 W0.0 I0.1 W0.1
        device 1 | ···· F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 I1.0 W3.1 I1.1 W1.0 W1.1
    """
    # Further down fewer forwards run ahead, p-d with one chunk, and d weight gradients wait: a
    # microbatch is kept until its W, so each device keeps p of them, as the first one of 1f1b does.
    warmup = (v - 1) * group_size(p, m) + (p - 1 - d)
    return _held_back(p, m, v, d, warmup, held=d)


def handcrafted_2(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """eager-1f1b whose weight gradients wait twice as long, so that no device has to: zb-h2.

    p=3 m=6 v=1
        device 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 ·····
        device 1 | ·· F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ··
        device 2 | ····· F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    # Likewise 2(p-1-d)+1 forwards ahead and 2d weight gradients that wait: 2p-1 on each device.
    return _held_back(p, m, v, d, warmup=2 * (p - 1 - d), held=2 * d)


def _held_back(p: int, m: int, v: int, d: int, warmup: int, held: int) -> Iterator[Task]:
    """Each input gradient is followed by the oldest weight gradient, but not the first `held` ones.

    Then every device keeps as many microbatches as the first. Once no forward is left for which
    one could wait, none is held back.
    """
    weights = in_groups(Kind.WEIGHT_GRADIENT, p, m, v, d)
    held = min(held, max(0, m * v - warmup - 1))
    for task in in_turn(p, m, v, d, warmup, Kind.INPUT_GRADIENT):
        yield task
        if task.kind is Kind.FORWARD:
            continue
        if held:
            held -= 1
        else:
            yield next(weights)
    yield from weights


def vee(p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """Two chunks on the way down and up a V, so that loss and embedding meet on device 0: zb-v.

    Device d holds stages d and 2p-1-d. The plan is for at least 2p-1 microbatches; those that there
    are not are left out of it. p=2 m=2 v=2
        device 0 | F0.0 F0.1 ···· F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 ···· I0.1 W0.1
        device 1 | ···· F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1 ····
    """
    del v
    turns = {step: count() for step in _STEPS}
    for step in _vee_steps(p, max(m, 2 * p - 1), d):
        kind, chunk = step
        microbatch = next(turns[step])
        if microbatch < m:
            yield Task(kind, d if chunk == 0 else 2 * p - 1 - d, microbatch)


Step = tuple[Kind, int]
F0, F1 = ((Kind.FORWARD, chunk) for chunk in (0, 1))
I0, I1 = ((Kind.INPUT_GRADIENT, chunk) for chunk in (0, 1))
W0, W1 = ((Kind.WEIGHT_GRADIENT, chunk) for chunk in (0, 1))
_STEPS = (F0, F1, I0, I1, W0, W1)


def _vee_steps(p: int, n: int, d: int) -> Iterator[Step]:
    """The kinds and chunks that device d runs, for n >= 2p-1 microbatches (Qi et al. 2024)."""
    # 1. Warm-up: microbatches go down the V, chunk 0, and come back up, chunk 1.
    yield from [F0] * (2 * (p - d) - 1)
    yield from [F1, F0] * d
    yield from [F1, I1, W1] * (p - d)
    # 2. Steady: so far 2p-1-d microbatches have begun and p have turned round. Each turn ends one
    #    and, while any is left, begins one.
    begun = 2 * p - 1 - d
    for k in range(n - p):
        yield from [F0, I0, W0, F1, I1, W1] if k < n - begun else [I0, W0, F1, I1, W1]
    # 3. Drain: input gradients first, as other devices wait for them.
    yield from [I0, I1] * d
    yield from [I0, W0] * (p - d)
    yield from [W1] * d
    yield from [W0] * d
