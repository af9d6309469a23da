"""How long the slowest stage waits for each of the others, once a step, under a schedule.

F, I and W are a stage's forward and the halves of its backward. Its F has to pass before the last
stage can begin, and I and W after the last stage has ended, but for what a weight gradient fills.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType

import numpy as np

from autopar.passes.stage.ranges import Floats


class Gap(StrEnum):
    """What is waited for: all of a microbatch, all but W and what W fills, or F alone."""

    WHOLE = "F + I + W"
    DRAIN = "F + I - W"
    FILL = "F"


_GAPS = MappingProxyType(
    {
        "zb-h1": Gap.DRAIN,
        "zb-interleaved": Gap.DRAIN,
        "zb-h2": Gap.FILL,
        "zb-v": Gap.FILL,
    }
)


def gap_of(schedule: str) -> Gap:
    """What the schedule's slowest stage waits for."""
    return _GAPS.get(schedule, Gap.WHOLE)


def gap_seconds(gap: Gap, whole: Floats, forward: Floats, weight: Floats) -> Floats:
    """The wait for stages that take `whole`, with their F and W."""
    if gap is Gap.WHOLE:
        return whole
    if gap is Gap.FILL:
        return forward
    drained: Floats = np.maximum(whole - 2 * weight, 0.0)
    return drained
