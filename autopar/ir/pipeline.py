"""What a plan of several stage programs holds beside its arguments: stages, submeshes, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from autopar.errors import GraphError
from autopar.ir.mesh import MeshShape
from autopar.ir.outcome import Outcome
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Submesh
from autopar.ir.text import columns, show_bytes, show_seconds


@dataclass(frozen=True)
class PlannedStage:
    """A stage: the layers it runs, where, and what that should take a microbatch.

    `stop` is the number of ops of the microbatch's graph that its layers and those before end
    with; `name` are the user's modules. Where the forward is recomputed, what crosses the `cuts`
    (numbers of ops) is kept. Seconds are of one microbatch, `once_seconds` of a step;
    `activation_bytes` are kept from a microbatch's forward to its backward, `kept_bytes` of them
    until its weight gradients; `peak_bytes` are what one device of its submesh holds at most.
    """

    name: str
    layers: int
    stop: int
    submesh: int
    recompute: bool
    cuts: tuple[int, ...]
    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    once_seconds: float
    activation_bytes: int
    kept_bytes: int
    peak_bytes: int

    def verify(self, number: int, start: int) -> None:
        """Raise GraphError unless stage `number`, which begins with op `start`, can be one."""
        inside = [start, *self.cuts, self.stop]
        if self.layers < 1 or any(a >= b for a, b in pairwise(inside)):
            raise GraphError(
                f"stage {number} runs {self.layers} layers, from op {start} to {self.stop}, with "
                f"cuts {list(self.cuts)}"
            )
        figures = (
            self.forward_seconds, self.input_gradient_seconds, self.weight_gradient_seconds,
            self.once_seconds, self.activation_bytes, self.kept_bytes, self.peak_bytes,
        )  # fmt: skip
        if min(figures) < 0:
            raise GraphError(f"the seconds and bytes of stage {number} cannot be negative")

    @property
    def backward_seconds(self) -> float:
        """Both halves of the backward of one microbatch."""
        return self.input_gradient_seconds + self.weight_gradient_seconds


@dataclass(frozen=True)
class PipelinePlan:
    """Stages on submeshes, and the schedule that takes microbatches through them.

    `batch` rows are cut into `microbatches`. `shardings` has one plan for each submesh.
    `send_seconds` is how long what a stage sends to the next is under way, `launch_seconds` what
    starting a part takes. `bubble_seconds` is how long the device that waits longest waits in a
    step, and `notes` say what makes the
    microbatches exact.
    """

    schedule: str
    microbatches: int
    batch: int
    submeshes: tuple[Submesh, ...]
    stages: tuple[PlannedStage, ...]
    shardings: tuple[ShardingPlan, ...]
    outcome: Outcome
    send_seconds: tuple[float, ...]
    launch_seconds: float
    bubble_seconds: float
    peak_in_flight: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def device_count(self) -> int:
        """Devices of all submeshes."""
        return sum(s.mesh.device_count for s in self.submeshes)

    def mesh_of(self, submesh: int) -> MeshShape:
        """The logical mesh of a submesh."""
        return self.submeshes[submesh].mesh

    def verify(self) -> None:
        """Raise GraphError unless stages, submeshes and figures fit together.

        Stages follow one another and cover the ops up to the last one's end, each on a submesh
        that there is; submeshes share no device.
        """
        if not self.stages or not self.submeshes or len(self.stages) % len(self.submeshes):
            raise GraphError(f"{len(self.stages)} stages on {len(self.submeshes)} submeshes")
        if self.microbatches < 1 or self.batch < 0 or self.batch % self.microbatches:
            raise GraphError(f"{self.batch} rows cannot be cut into {self.microbatches}")
        for submesh in self.submeshes:
            submesh.verify()
        taken = [d for s in self.submeshes for d in s.devices]
        if len(set(taken)) != len(taken) or (len(self.submeshes) > 1) > all(
            s.devices for s in self.submeshes
        ):
            raise GraphError("two submeshes share a device")
        if [s.mesh for s in self.shardings] != [s.mesh for s in self.submeshes]:
            raise GraphError("the shardings are not on the meshes of the submeshes")
        start = 0
        for number, stage in enumerate(self.stages):
            stage.verify(number, start)
            start = stage.stop
        if {s.submesh for s in self.stages} != set(range(len(self.submeshes))):
            raise GraphError("the stages are on submeshes that there are not, or leave one out")
        counts = (len(self.send_seconds), len(self.peak_in_flight))
        if counts != (len(self.stages) - 1, len(self.submeshes)):
            raise GraphError(f"there are {counts[0]} transfers and {counts[1]} peaks in flight")
        seconds = (*self.send_seconds, self.launch_seconds, self.bubble_seconds)
        if min(*seconds, *self.peak_in_flight) < 0:
            raise GraphError("seconds and microbatches in flight cannot be negative")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{len(self.stages)} stages on {len(self.submeshes)} submeshes, {self.schedule}, "
            f"{self.microbatches} microbatches of {self.batch // self.microbatches} rows"
        )
        rows = [
            [f"S{i}", f"mesh{s.submesh} ({self.mesh_of(s.submesh)})", f"{s.layers} layers",
             f"F {show_seconds(s.forward_seconds)}", f"B {show_seconds(s.backward_seconds)}",
             f"once {show_seconds(s.once_seconds)}", show_bytes(s.peak_bytes), s.name]
            for i, s in enumerate(self.stages)
        ]  # fmt: skip
        yield from columns(rows, "  ")
        yield from (f"  {note}" for note in self.notes)
