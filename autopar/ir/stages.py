"""A step cut into layers, consecutive ranges of ops, and the stages that run them on submeshes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.sharding import MeshShape
from autopar.ir.text import columns, show_bytes, show_count


@dataclass(frozen=True)
class Layer:
    """Ops first..last (both included) of the graph.

    `name` is the user's module path; `same_as` is the first layer that is like this one, and so
    need not be priced again (-1: none before it).
    """

    first: int
    last: int
    flops: int
    cut_bytes: int  # bytes that cross to later layers
    name: str = ""
    same_as: int = -1

    @property
    def op_count(self) -> int:
        """The number of ops of the layer."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class LayerSequence:
    """A graph whose forward ops lie in layers that follow one another.

    What comes after the last layer (backward, update) has its home with a layer too: `homes` has
    a layer for every op, -1 for one that runs wherever it is read (scalars that join layers, what
    no layer owns). `input_homes` are the layers that read each graph input, the first of them its
    own: where a state leaf lives and is updated. Both are empty where all is one layer.
    """

    graph: Graph
    layers: tuple[Layer, ...]
    homes: tuple[int, ...] = ()
    input_homes: tuple[tuple[int, ...], ...] = ()

    def verify(self) -> None:
        """Raise GraphError unless the layers follow one another from op 0 within the graph."""
        expected, count = 0, len(self.graph.ops)
        for layer in self.layers:
            if layer.first != expected or layer.last < layer.first:
                raise GraphError(f"layer {layer.first}..{layer.last} should start at {expected}")
            expected = layer.last + 1
        if expected > count or (expected < count and not self.homes):
            raise GraphError(f"layers end at op {expected - 1} of {count - 1}")
        if self.homes and len(self.homes) != count:
            raise GraphError(f"{len(self.homes)} homes for {count} ops")

    def __str__(self) -> str:
        rows = [
            [f"L{i}:", f"ops {layer.first}..{layer.last}", show_count(layer.flops, "FLOP"),
             f"cut {show_bytes(layer.cut_bytes)}", layer.name,
             f"as L{layer.same_as}" if layer.same_as >= 0 else ""]
            for i, layer in enumerate(self.layers)
        ]  # fmt: skip
        return "\n".join([f"layers {self.graph.name} {{", *columns(rows, "  "), "}"])


ONE_PROGRAM = "none"  # the schedule of a step that is one program: one stage, one microbatch


@dataclass(frozen=True)
class Submesh:
    """A logical mesh on devices of its own: `devices` are numbers in the cluster, row-major.

    Empty `devices` are those of the whole cluster, in the order that suits the mesh.
    """

    mesh: MeshShape
    devices: tuple[int, ...] = ()

    def verify(self) -> None:
        """Raise GraphError unless the devices are as many as the mesh has, and in one block."""
        start = min(self.devices, default=0)
        block = range(start, start + self.mesh.device_count)
        if self.devices and (start < 0 or sorted(self.devices) != list(block)):
            raise GraphError(
                f"a submesh ({self.mesh}) has devices {list(self.devices)[:8]}, not a block of "
                f"{self.mesh.device_count}"
            )


class Remat(StrEnum):
    """The forward values that a stage keeps of a microbatch for its backward part.

    The rest it computes again from what came into the stage and what crosses its cuts, which are
    kept always.
    """

    NONE = "none"  # nothing is computed again
    SELECTIVE = "selective"  # all but products with parameters: norms, gelus, attention scores
    FULL = "full"


@dataclass(frozen=True)
class Stage:
    """Layers first..last (both included) on a submesh, by number.

    Schedules with several chunks a device give a submesh several stages.
    """

    first: int
    last: int
    submesh: int = 0
    remat: Remat = Remat.NONE
    cuts: tuple[int, ...] = ()  # numbers of ops: what crosses them is kept where it recomputes


@dataclass(frozen=True)
class StagePlan:
    """The stages of a step, the number of microbatches, and the schedule that runs them."""

    layers: LayerSequence
    stages: tuple[Stage, ...]
    submeshes: tuple[Submesh, ...]
    microbatches: int = 1
    schedule: str = ONE_PROGRAM

    @property
    def is_one_program(self) -> bool:
        """True if the step is one program on one mesh: no pipeline stages and no microbatches."""
        return self.schedule == ONE_PROGRAM

    @property
    def chunks(self) -> int:
        """The number of stages on each submesh."""
        return max(1, len(self.stages) // max(1, len(self.submeshes)))

    def verify(self) -> None:
        """Raise GraphError unless the stages cover the layers in order, on submeshes there are."""
        expected = 0
        for stage in self.stages:
            is_empty = not self.layers.layers and stage.last < 0  # of a step without ops
            if stage.first != expected or (stage.last < stage.first and not is_empty):
                raise GraphError(f"stage {stage.first}..{stage.last} should start at {expected}")
            if not 0 <= stage.submesh < len(self.submeshes):
                raise GraphError(f"stage {stage.first}..{stage.last} has no submesh")
            expected = stage.last + 1
        if expected != len(self.layers.layers):
            raise GraphError(f"stages end at layer {expected - 1}, not at the last")
        taken = [d for s in self.submeshes for d in s.devices]
        if len(set(taken)) != len(taken):
            raise GraphError("two submeshes share a device")

    def __str__(self) -> str:
        lines = [
            f"  S{i}: L{s.first}..L{s.last}  mesh{s.submesh} ({self.submeshes[s.submesh].mesh})"
            + (f"  {s.remat} remat" if s.remat is not Remat.NONE else "")
            for i, s in enumerate(self.stages)
        ]
        how = "" if self.is_one_program else f", {self.schedule}"
        head = f"stages {self.layers.graph.name}  microbatches {self.microbatches}{how} {{"
        return "\n".join([head, *lines, "}"])
