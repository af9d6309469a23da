"""Costs of the tasks of each stage: seconds, seconds of transfers, and bytes kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import ScheduleError


@dataclass(frozen=True)
class StageTimes:
    """Costs by stage; for S stages there are S-1 boundaries between a stage and the next.

    `forward`, `input_gradient` and `weight_gradient` are seconds; a whole backward takes the sum of
    the latter two. `send_seconds` is how long what stage s sends to s+1 is under way, and
    `return_seconds` the gradient from s+1 to s, the same if it is left out; what stays on a device
    takes no time. `activation_bytes` are held from the start of a forward to the end of its
    backward or input gradient, `kept_bytes` of them until the end of the weight gradient.

    Raises ScheduleError where a list has the wrong length, or a cost is below zero or no number.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    send_seconds: tuple[float, ...] = ()
    return_seconds: tuple[float, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    kept_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        s = len(self.forward)
        faults = [
            *_faults("forward", self.forward, {s}),
            *_faults("input_gradient", self.input_gradient, {s}),
            *_faults("weight_gradient", self.weight_gradient, {s}),
            *_faults("send_seconds", self.send_seconds, {0, s - 1}),
            *_faults("return_seconds", self.return_seconds, {0, s - 1}),
            *_faults("activation_bytes", self.activation_bytes, {0, s}),
            *_faults("kept_bytes", self.kept_bytes, {0, s}),
        ]
        if faults:
            raise ScheduleError(f"times of {s} stages cannot be used: {'; '.join(faults)}")

    @property
    def stage_count(self) -> int:
        """Number of stages that the costs are of."""
        return len(self.forward)


def even_times(
    devices: int, chunks: int, *, forward: float, input_gradient: float, weight_gradient: float,
    latency: float = 0.0,
) -> StageTimes:  # fmt: skip
    """Costs of stages that are all alike: seconds of a whole device, shared by its chunks."""
    stages = devices * chunks
    return StageTimes(
        forward=(forward / chunks,) * stages,
        input_gradient=(input_gradient / chunks,) * stages,
        weight_gradient=(weight_gradient / chunks,) * stages,
        send_seconds=(latency,) * (stages - 1),
    )


def _faults(name: str, costs: tuple[float, ...], counts: set[int]) -> list[str]:
    if len(costs) not in counts:
        return [f"{name} has {len(costs)} costs, not {max(counts)}"]
    bad = [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]
    return [f"{name} has {', '.join(map(str, bad))}, which is no cost"] if bad else []
