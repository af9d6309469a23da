"""A plan: every decision about a step, what it predicts, and what it was made for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

from autopar.errors import GraphError
from autopar.ir.codec import ByName, Text
from autopar.ir.compiler_options import CompilerOptions, check_options, options_text
from autopar.ir.listing import Traffic
from autopar.ir.peak import Peak
from autopar.ir.rate import Rate, items_of_batch
from autopar.ir.record import Record
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.sharding_plan import Outcome, Recomputation, ShardingPlan
from autopar.ir.stages import ONE_PROGRAM, Remat, Submesh
from autopar.ir.text import columns, show_bytes, show_seconds
from autopar.ir.values import Role, Value

MPMD, SPMD = LOWERINGS = "mpmd", "spmd"  # many programs, or one for all devices
RESULT = "result"  # the role of an output that does not come back as state

# Bounds on what a file may ask for: the shardings of a mesh grow with the power of its axes.
_MOST_AXES, _MOST_DEVICES = 8, 2**24
# Rows of a leaf that stages share, as paths of arguments have them: "params/w[0:4]".
_ROWS = re.compile(r"\[(\d+):(\d+)\]$")
_NO_TIME = 0.001  # a share of a step that nobody speaks of


@dataclass(frozen=True)
class Argument:
    """An argument or output of the step, and how it lies on a submesh of the plan."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    sharding: Sharding
    submesh: int = 0

    def verify(self, mesh: MeshShape) -> None:
        """Raise GraphError unless it can lie so on its mesh, whole and not as a partial sum."""
        known = {*(role.value for role in Role), RESULT}
        fits = self.sharding.fits(self.shape, mesh) and not self.sharding.partial
        if min(self.shape, default=0) < 0 or not fits or not self.dtype or self.role not in known:
            raise GraphError(
                f"{self.role} {self.path} {self.dtype}{list(self.shape)} cannot lie as "
                f"{self.sharding} on ({mesh})"
            )

    @property
    def rows(self) -> slice | None:
        """The rows of a leaf that stages share, as its path has them; None of a whole leaf."""
        found = _ROWS.search(self.path)
        return None if found is None else slice(int(found[1]), int(found[2]))

    @property
    def value(self) -> Value:
        """The whole array."""
        return Value(self.path, self.shape, self.dtype)

    def local_bytes(self, mesh: MeshShape) -> int:
        """Bytes of one device's piece."""
        return self.sharding.local_bytes(self.value, mesh)


@dataclass(frozen=True)
class LeafArguments:
    """A leaf of a step's arguments: a plan has it as one argument, or its rows as several."""

    path: str
    shape: tuple[int, ...]
    arguments: tuple[Argument, ...]


def leaf_arguments(planned: Iterable[Argument]) -> Iterator[LeafArguments]:
    """The leaves that a plan's arguments are, pieces of one together."""
    for path, group in groupby(planned, lambda a: _ROWS.sub("", a.path)):
        own = tuple(group)
        shape = own[0].shape
        if len(own) > 1:
            shape = (sum(a.shape[0] for a in own), *shape[1:])
        yield LeafArguments(path, shape, own)


@dataclass(frozen=True)
class Prediction:
    """The time, traffic and memory that one step should take on each device.

    `communication_seconds` are those of all collectives; `exposed_seconds` is the part of them that
    runs beside no work and so is waited for. `send_seconds` is how long what a stage sends to the
    next is under way, `launch_seconds` what starting a part takes, and `bubble_seconds` how long
    the device that waits longest waits in a step. `peak_in_flight` is the largest number of
    microbatches whose activations a submesh holds. `model_flops` are those of a whole step's
    products without recomputation, `peak_flops` what all devices do in a second at their best, in
    the dtype of most products. Of the work of the submesh that works longest, `arithmetic_seconds`
    are bound by arithmetic and `memory_seconds` by the bandwidth of memory.
    """

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    traffic: tuple[Traffic, ...]
    argument_bytes: int
    peak_bytes: int
    peak: Peak | None = None
    send_seconds: tuple[float, ...] = ()
    launch_seconds: float = 0.0
    bubble_seconds: float = 0.0
    peak_in_flight: tuple[int, ...] = (1,)
    model_flops: float = 0.0  # more than 64 bits can count
    peak_flops: float = 0.0
    arithmetic_seconds: float = 0.0
    memory_seconds: float = 0.0

    def verify(self, meshes: Sequence[MeshShape]) -> None:
        """Raise GraphError where a figure cannot be, or something is not on these meshes."""
        figures = (
            self.seconds, self.communication_seconds, self.exposed_seconds, self.argument_bytes,
            self.peak_bytes, self.launch_seconds, self.bubble_seconds, *self.send_seconds,
            *self.peak_in_flight, self.model_flops, self.peak_flops, self.arithmetic_seconds,
            self.memory_seconds,
        )  # fmt: skip
        if min(figures) < 0:
            raise GraphError("predicted seconds, bytes and FLOPs cannot be negative")
        for traffic in self.traffic:
            traffic.verify(meshes)
        if self.peak is not None:
            self.peak.verify(meshes)

    def mfu(self, seconds: float) -> float | None:
        """The model FLOPs utilization of a step that takes so long; None without products."""
        able = self.peak_flops * seconds
        return self.model_flops / able if self.model_flops and able > 0 else None

    @property
    def roofline(self) -> tuple[tuple[str, float], ...]:
        """The resources that bind the device that works longest, with its seconds on each.

        Compute (arithmetic units), HBM (bandwidth of memory), network (collectives that are waited
        for) and, in a pipeline, idle.
        """
        spent = (
            ("compute", self.arithmetic_seconds),
            ("HBM", self.memory_seconds),
            ("network", self.exposed_seconds),
        )
        idle = self.seconds - sum(seconds for _, seconds in spent)
        return (*spent, ("idle", idle)) if idle > _NO_TIME * self.seconds else spent

    @property
    def compute_seconds(self) -> float:
        """Seconds of the step in which the device does not wait for communication."""
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True)
class Origin:
    """The step, cluster and request of a plan: checked when it meets them or a JAX again."""

    step: str
    graph_key: str
    cluster: Text  # as TOML, so that a plan carries its prices
    cluster_name: str
    cluster_fingerprint: str
    jax_minor: str
    method: str
    memory_bytes: int
    pins: ByName[tuple[tuple[str, ...], ...]] = ()


@dataclass(frozen=True)
class PlannedSubmesh:
    """The devices of a submesh in the order of its logical mesh, and how its values lie on it.

    Without `devices` it has all of the cluster, in the order that suits the mesh.
    """

    devices: tuple[int, ...]
    sharding: ShardingPlan

    @property
    def mesh(self) -> MeshShape:
        """The logical mesh."""
        return self.sharding.mesh

    @property
    def submesh(self) -> Submesh:
        """The mesh and its devices alone."""
        return Submesh(self.mesh, self.devices)


@dataclass(frozen=True)
class PlannedStage:
    """A stage: the layers it runs, its submesh, and the seconds and bytes it should take.

    `stop` is the number of ops of the microbatch's graph that its layers and those before end
    with; `name` are the user's modules. Where forward values are recomputed, what crosses the
    `cuts` (numbers of ops) is kept. Seconds are of one microbatch, `once_seconds` of a step: all
    of the seconds of a step that is one program. `activation_bytes` are kept from a microbatch's
    forward to its backward, `kept_bytes` of them until its weight gradients; `peak_bytes` are the
    most that one device of its submesh holds.
    """

    name: str
    layers: int
    stop: int
    submesh: int
    remat: Remat
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
        is_nothing = (number, self.layers, self.stop) == (0, 0, 0)  # a step without ops
        if (self.layers < 1 or any(a >= b for a, b in pairwise(inside))) and not is_nothing:
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
class Plan:
    """Everything that running a step needs, with no solving left.

    The stages follow one another on the submeshes, and `schedule` takes the microbatches through
    them; `batch` is the rows of all microbatches. A step that is one program is one stage on one
    submesh with one microbatch, under the schedule ONE_PROGRAM. `notes` say what makes the
    microbatches exact. The programs are compiled with the `compiler_options` but for those of
    another platform than the devices'. The `record` is the step itself as text: what a plan means
    is told from it, and running does not need it.
    """

    origin: Origin
    submeshes: tuple[PlannedSubmesh, ...] = field(repr=False)
    stages: tuple[PlannedStage, ...] = field(repr=False)
    arguments: tuple[Argument, ...] = field(repr=False)
    outputs: tuple[Argument, ...] = field(repr=False)
    prediction: Prediction
    outcome: Outcome
    schedule: str = ONE_PROGRAM
    lowering: str = SPMD
    microbatches: int = 1
    batch: int = 0
    recomputation: Recomputation = field(default_factory=Recomputation)
    notes: tuple[str, ...] = ()
    compiler_options: CompilerOptions = ()
    record: Record | None = field(default=None, repr=False)

    @property
    def is_one_program(self) -> bool:
        """True if the step is one program on one mesh: no pipeline stages and no microbatches."""
        return self.schedule == ONE_PROGRAM

    @property
    def is_spmd_pipeline(self) -> bool:
        """True if all stages and microbatches run as one SPMD program, which takes its turns."""
        return self.lowering == SPMD and not self.is_one_program

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The forward values that are computed again for the backward pass."""
        return self.recomputation.values

    @property
    def sharding(self) -> ShardingPlan:
        """The sharding of the first submesh: of the whole step if it is one program."""
        return self.submeshes[0].sharding

    @property
    def mesh(self) -> MeshShape:
        """The logical mesh of the first submesh."""
        return self.submeshes[0].mesh

    @property
    def device_count(self) -> int:
        """The number of devices of all submeshes."""
        return sum(s.mesh.device_count for s in self.submeshes)

    def rate(self, seconds: float | None = None) -> Rate:
        """The tokens or samples a second and the MFU of a step that takes so long.

        Without `seconds` it is the predicted rate; with them, that of a step that was measured.
        """
        taken = self.prediction.seconds if seconds is None else seconds
        batch = [(a.shape, a.dtype) for a in self.arguments if a.role == Role.BATCH.value]
        count, items = items_of_batch(batch)
        speed = count / taken if taken > 0 else 0.0
        return Rate(taken, self.prediction.mfu(taken), items, speed)

    @property
    def state(self) -> tuple[Argument, ...]:
        """The arguments that are state."""
        return tuple(a for a in self.arguments if a.role == Role.STATE.value)

    @property
    def layer_count(self) -> int:
        """The number of layers of all stages."""
        return sum(s.layers for s in self.stages)

    def with_sharding(self, submesh: int, sharding: ShardingPlan) -> Plan:
        """The plan with one submesh sharded otherwise; predictions stay what they were."""
        submeshes = list(self.submeshes)
        submeshes[submesh] = replace(submeshes[submesh], sharding=sharding)
        return replace(self, submeshes=tuple(submeshes))

    def mesh_of(self, argument: Argument) -> MeshShape:
        """The logical mesh that an argument lies on."""
        return self.submeshes[argument.submesh].mesh

    def check(self) -> None:
        """Raise GraphError unless everything in the plan fits together and its own step.

        Whether the step that it meets later is the same, and whether the plan computes it, is
        checked there. What fits once fits for good: a file is checked as it is read, and the plan
        that is opened again is not gone through once more.
        """
        _ = self._is_checked

    @cached_property
    def _is_checked(self) -> bool:
        again = self.recomputation
        if self.origin.memory_bytes < 1 or again.saved_bytes < 0:
            raise GraphError("the limit, or what is computed again, has figures below 0")
        check_options(self.compiler_options)
        self._check_submeshes()
        self._check_stages()
        meshes = tuple(s.mesh for s in self.submeshes)
        self.prediction.verify(meshes)
        for held in (*self.arguments, *self.outputs):
            if not 0 <= held.submesh < len(meshes):
                raise GraphError(f"{held.path} is on submesh {held.submesh}, which there is not")
            held.verify(meshes[held.submesh])
        if self.record is not None:
            self._check_record(self.record)
        return True

    def _check_submeshes(self) -> None:
        """The same of the submeshes, which share no device."""
        for submesh in self.submeshes:
            mesh = submesh.mesh
            if len(mesh.names) > _MOST_AXES or mesh.device_count > _MOST_DEVICES:
                raise GraphError(f"no plan is for a mesh ({mesh})")
            submesh.submesh.verify()
        taken = [d for s in self.submeshes for d in s.devices]
        named = all(s.devices for s in self.submeshes) or len(self.submeshes) == 1
        if len(set(taken)) != len(taken) or not named:
            raise GraphError("two submeshes share a device")

    def _check_stages(self) -> None:
        """The same of the stages, which follow one another and use every submesh equally often."""
        stages, submeshes = len(self.stages), len(self.submeshes)
        if not stages or not submeshes or stages % submeshes:
            raise GraphError(f"{stages} stages on {submeshes} submeshes")
        if self.microbatches < 1 or self.batch < 0 or self.batch % self.microbatches:
            raise GraphError(f"{self.batch} rows cannot be cut into {self.microbatches}")
        if self.is_one_program != (stages == self.microbatches == 1):
            raise GraphError(
                f"{stages} stages and {self.microbatches} microbatches cannot run under schedule "
                f"{self.schedule!r}"
            )
        if self.lowering not in (LOWERINGS if not self.is_one_program else (SPMD,)):
            raise GraphError(f"nothing of the kind is lowered by {self.lowering!r}")
        start = 0
        for number, stage in enumerate(self.stages):
            stage.verify(number, start)
            start = stage.stop
        if {s.submesh for s in self.stages} != set(range(submeshes)):
            raise GraphError("the stages are on submeshes that there are not, or leave one out")
        p = self.prediction
        counts = (len(p.send_seconds), len(p.peak_in_flight))
        if counts != (stages - 1, submeshes):
            raise GraphError(f"there are {counts[0]} transfers and {counts[1]} peaks in flight")

    def _check_record(self, record: Record) -> None:
        """The same of the step that the plan keeps."""
        batching = record.batching
        batching.verify()
        graph = batching.graph
        if (batching.microbatches, batching.batch) != (self.microbatches, self.batch):
            raise GraphError("the step that the plan keeps is cut into other microbatches")
        if batching.is_whole != self.is_one_program:
            raise GraphError("a plan of one program keeps a step in microbatches, or the reverse")
        if self.stages[-1].stop > len(graph.ops):
            raise GraphError(f"the stages end after the {len(graph.ops)} ops of {graph.name}")
        if not batching.is_whole:
            for submesh in self.submeshes:
                submesh.sharding.verify_values(graph)
            return
        self.sharding.verify(graph)
        kept = [(i.path, i.value.shape, i.value.dtype, i.role.value) for i in graph.inputs]
        if kept != [(a.path, a.shape, a.dtype, a.role) for a in self.arguments]:
            raise GraphError(f"the arguments are not those of {graph.name}")
        if [graph.value(o).shape for o in graph.outputs] != [o.shape for o in self.outputs]:
            raise GraphError(f"the outputs are not those of {graph.name}")

    # The JSON form knows this type, and is imported where it is asked for.

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON: whole, or not at all."""
        from autopar.ir.plan_file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan; raises PlanFileError where it is missing or damaged."""
        from autopar.ir.plan_file import load_plan

        return load_plan(path)

    def _repr_html_(self) -> str:
        """The printed plan as HTML, for notebooks; a ParallelStep shows itself as a card."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        p = self.prediction
        o = self.origin
        many = len(self.submeshes) > 1
        where = f"{self.device_count} devices" if many else f"({self.mesh})"
        yield f"plan {o.step} on {o.cluster_name} {where}, {o.method}"
        yield f"  {self.outcome}"
        if not self.is_one_program:
            yield from (f"  {line}" for line in self._stage_lines())
        yield (
            f"  predicted {show_seconds(p.seconds)} a step, "
            f"{show_seconds(p.exposed_seconds)} of it "
            f"waiting for communication (of {show_seconds(p.communication_seconds)}); "
            f"{show_bytes(p.peak_bytes)} a device"
        )
        if self.recomputed:
            yield f"  {self.recomputation}"
        if self.compiler_options:
            yield f"  compiled with {options_text(self.compiler_options)}"
        rows = [
            [t.kind, "+".join(t.axes), f"x{t.count}", show_bytes(t.nbytes), show_seconds(t.seconds)]
            for t in p.traffic
        ]
        yield from columns(rows, "  ")

    def _stage_lines(self) -> Iterator[str]:
        yield (
            f"{len(self.stages)} stages on {len(self.submeshes)} submeshes, {self.schedule}, "
            f"{self.microbatches} microbatches of {self.batch // self.microbatches} rows"
        )
        rows = [
            [f"S{i}", f"mesh{s.submesh} ({self.submeshes[s.submesh].mesh})", f"{s.layers} layers",
             f"F {show_seconds(s.forward_seconds)}", f"B {show_seconds(s.backward_seconds)}",
             f"once {show_seconds(s.once_seconds)}", show_bytes(s.peak_bytes), s.name]
            for i, s in enumerate(self.stages)
        ]  # fmt: skip
        yield from columns(rows, "  ")
        if self.is_spmd_pipeline:
            yield "  all stages are one program: a step is one call of the host"
        yield from (f"  {note}" for note in self.notes)
