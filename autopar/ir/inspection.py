"""The meaning of a plan: op by op, collective by collective, kernel by kernel and over time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from autopar.ir.peak import HeldKind
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.sharding_plan import OpPath

WHOLE_STEP = -1  # the stage of what belongs to none
IN_STEP, IN_UPDATE = "(step)", "(update)"  # the modules of ops that are in none of the model's


class AxisRole(Enum):
    """The use of a mesh axis, in the field's words."""

    DATA = "data"  # the rows of the batch are sharded over it
    FSDP = "fsdp"  # parameters or optimizer state are sharded over it and gathered before use
    TENSOR = "tensor"  # matrix products are sharded over it, with weights that are not gathered
    SEQUENCE = "sequence"  # activations are sharded over it along the sequence
    EXPERT = "expert"  # experts of a mixture are sharded over it
    REPLICA = "replica"  # nothing is sharded over it: its devices do the same


@dataclass(frozen=True)
class AxisUse:
    """An axis of a submesh, what it is used for, most telling role first, and what shows it."""

    submesh: int
    axis: str
    size: int
    roles: tuple[AxisRole, ...]
    evidence: tuple[str, ...]  # a sentence for each role


@dataclass(frozen=True)
class Spot:
    """A place in the step: the stage and its part ("F0"), and the user's code.

    `stage` is WHOLE_STEP and `part` "" in a plan of one program.
    """

    region: str
    module: str
    line: str
    stage: int = WHOLE_STEP
    part: str = ""


@dataclass(frozen=True)
class OpRow:
    """Ops that are alike (kind, line, region, types, shardings; modules that differ in numbers).

    `path` and `value` are of the first of them. `flops` are of all of them in a step over all
    devices, `seconds` of all of them in a step on one device; of an op that is fused into
    another they are 0. `local_shape` is one device's piece of the result.
    """

    path: OpPath
    kind: str
    spot: Spot
    value: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    local_shape: tuple[int, ...]
    operands: tuple[tuple[str, Sharding], ...]  # type as text, and how each is read
    count: int
    runs: int  # of all of them in a step
    flops: int
    seconds: float


@dataclass(frozen=True)
class CommRow:
    """Collectives that are alike: one kind over the same axes for the same line of the user's.

    `value` is what is moved, an argument's path or the module and op that make it; `reader` is
    the kind of op that it is moved for. `nbytes` are of one run: the buffer of one device before it
    is scattered or after it is gathered. Seconds are of all runs of a step; `exposed_seconds` of
    them are waited for. `members` are the values moved.
    """

    kind: str
    axes: tuple[str, ...]
    roles: tuple[AxisRole, ...]
    submesh: int
    spot: Spot
    value: str
    shape: tuple[int, ...]
    dtype: str
    before: Sharding
    after: Sharding
    reader: str
    nbytes: int
    runs: int
    seconds: float
    exposed_seconds: float
    members: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs of a step."""
        return self.nbytes * self.runs

    @property
    def hidden_seconds(self) -> float:
        """Seconds that work hides."""
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True)
class KernelSpan:
    """A kernel on one of a device's two streams, "work" or "wires"; a very long loop is one."""

    stream: str
    start_seconds: float
    end_seconds: float
    label: str
    spot: Spot


@dataclass(frozen=True)
class MemoryLevel:
    """The bytes of one device at a moment, arguments included, by kind; at so many seconds."""

    seconds: float
    label: str  # the kernel that runs then
    by_kind: tuple[tuple[HeldKind, int], ...]

    @property
    def nbytes(self) -> int:
        """The sum over all kinds."""
        return sum(n for _, n in self.by_kind)


@dataclass(frozen=True)
class MemoryCurve:
    """The bytes of one device of a submesh over a step; of many kernels the telling ones."""

    submesh: int
    levels: tuple[MemoryLevel, ...]
    limit_bytes: int

    @property
    def peak(self) -> int:
        """The index of the level that holds the most."""
        return max(range(len(self.levels)), key=lambda i: self.levels[i].nbytes, default=0)


@dataclass(frozen=True)
class ModuleRow:
    """A part of the model by its module path, with all that is in it, and where it runs.

    Modules whose paths differ in numbers and that are alike are one row of `count`. Bytes are of
    whole parameters, `seconds` of a step on one device, forward and backward. `depth` counts the
    parts of the path; the path "" is the whole step. What is in no module is in "(step)", or in
    "(update)" where it is of the update.
    """

    path: str
    depth: int
    count: int
    ops: int
    flops: int
    parameter_bytes: int
    seconds: float
    stages: tuple[int, ...]


InspectedPart = Literal["axes", "modules", "ops", "collectives", "spans", "memory"]
INSPECTED: tuple[InspectedPart, ...] = get_args(InspectedPart)


@dataclass(frozen=True)
class Inspection:
    """Everything that can be said of a plan without running it, or the parts that are asked for.

    `spans` are of one device over a step, loops trip by trip (none for a plan with stages, as its
    schedule tells). They end a little before the step's predicted seconds, in which some of what
    they hide is waited for. `meshes` are by submesh; `busiest` is the one that works longest, whose
    devices' traffic is the plan's.
    """

    meshes: tuple[MeshShape, ...]
    axes: tuple[AxisUse, ...]
    modules: tuple[ModuleRow, ...]
    ops: tuple[OpRow, ...]
    collectives: tuple[CommRow, ...]
    spans: tuple[KernelSpan, ...]
    memory: tuple[MemoryCurve, ...]
    busiest: int = 0

    @property
    def device_collectives(self) -> tuple[CommRow, ...]:
        """The collectives of a device of the busiest submesh, as the plan predicts them."""
        return tuple(row for row in self.collectives if row.submesh == self.busiest)
