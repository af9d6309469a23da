"""Input and answer of the stage search: the cost of every layer on every submesh, and the choice.

A `StageTable` is filled one layer at a time: layers that are equal share one `StageCost`, and an
interval of layers costs what `StageCost.of_layers` says. Letters:
m microbatches of a step, p stages, F forward, I and W the input- and weight-gradient halves of a
backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cluster.placement import Block, SubmeshShape
from autopar.cost.stage import StageCost
from autopar.errors import GraphError
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Remat


@dataclass(frozen=True)
class Option:
    """A logical mesh to run layers on, what they keep for the backward pass, and their costs.

    With `partial_sums` gradients are combined over devices once a step. `spare_bytes` are set
    aside: so much more was held by stages of the option, when they were built, than their layers'
    costs add up to.
    """

    mesh: MeshShape
    remat: Remat
    layers: tuple[StageCost, ...] = field(repr=False)
    partial_sums: bool = True
    spare_bytes: int = 0


@dataclass(frozen=True)
class BatchPrices:
    """The prices for one number of microbatches.

    `cut_bytes[b]` cross the boundary between layers b and b + 1 forwards, and as many backwards,
    for one microbatch over all devices. `options[u]` are for submesh u of the table.
    """

    microbatches: int
    cut_bytes: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]


@dataclass(frozen=True)
class StageTable:
    """Prices, submeshes, schedules and limits: all that the search reads.

    `memory_bytes` is the budget of one device. `batches` has one entry for each number of
    microbatches to try. `schedules` are the names that the loss allows. `task_seconds` is the
    dispatch of one F, B, I or W. No stage may end at the boundaries `joined` (boundary b lies
    between layers b and b + 1).
    """

    cluster: Cluster
    memory_bytes: int
    submeshes: tuple[SubmeshShape, ...]
    batches: tuple[BatchPrices, ...]
    schedules: tuple[str, ...]
    task_seconds: float = 0.0
    joined: tuple[int, ...] = ()

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self.batches[0].cut_bytes) + 1

    def verify(self) -> None:
        """Raise GraphError unless every part speaks of the same layers, submeshes and devices."""
        if not self.batches or not self.submeshes or not self.schedules:
            raise GraphError("a stage table needs a submesh, a number of microbatches, a schedule")
        for batch in self.batches:
            name = f"the stage table for {batch.microbatches} microbatches"
            if len(batch.cut_bytes) + 1 != self.layer_count:
                raise GraphError(f"{name} has {len(batch.cut_bytes)} boundaries between layers")
            if not any(batch.options) or len(batch.options) != len(self.submeshes):
                raise GraphError(f"{name} has options for {len(batch.options)} submeshes")
            for submesh, options in zip(self.submeshes, batch.options, strict=True):
                _check_options(name, submesh, options, self.layer_count)
        if any(not 0 <= b < self.layer_count - 1 for b in self.joined):
            raise GraphError(f"joined boundaries {self.joined} are not between layers")


def _check_options(
    name: str, submesh: SubmeshShape, options: tuple[Option, ...], layer_count: int
) -> None:
    for option in options:
        if len(option.layers) != layer_count:
            raise GraphError(f"{name} prices {len(option.layers)} of {layer_count} layers")
        if option.mesh.device_count != submesh.device_count:
            raise GraphError(f"{name} has mesh {option.mesh} for a submesh of {submesh}")


@dataclass(frozen=True)
class Wanted:
    """The user's choices; None leaves one to the search."""

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class ChosenStage:
    """Layers first..last (both included) on a block of devices, as a logical mesh."""

    first: int
    last: int
    block: Block
    mesh: MeshShape
    remat: Remat
    partial_sums: bool = True

    def __str__(self) -> str:
        again = f", {self.remat} remat" if self.remat is not Remat.NONE else ""
        return f"L{self.first}..L{self.last} on {self.block} ({self.mesh}){again}"


@dataclass(frozen=True)
class Choice:
    """Stages in the order of their layers, with their schedule, seconds and bytes.

    With `chunks` v > 1 there are v stages on each block of devices. `seconds` is the simulated
    step, `formula_seconds` what the formula gave before that, and `peak_bytes` the most bytes on
    one device of each block, in the order of the schedule's devices.
    """

    stages: tuple[ChosenStage, ...]
    microbatches: int
    schedule: str
    chunks: int
    seconds: float
    formula_seconds: float
    peak_bytes: tuple[int, ...]

    @property
    def devices(self) -> int:
        """p, blocks of devices that the stages are on."""
        return len(self.stages) // self.chunks

    def __str__(self) -> str:
        head = f"{self.schedule}, {self.microbatches} microbatches, {self.seconds:.6g} s"
        return "\n".join([head, *(f"  S{s}: {stage}" for s, stage in enumerate(self.stages))])
