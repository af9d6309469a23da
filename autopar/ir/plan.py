"""A plan: every decision about a step, what it predicts, and what it was made for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from autopar.errors import GraphError
from autopar.ir.codec import ByName, Text
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.outcome import Outcome
from autopar.ir.peak import Peak
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.recomputation import Recomputation
from autopar.ir.record import Record
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import COLLECTIVES, SpmdProgram
from autopar.ir.text import columns, show_bytes, show_seconds
from autopar.ir.values import Role, item_bytes

RESULT = "result"  # the role of an output that does not come back as state

# Bounds on what a file may ask for: the shardings of a mesh grow with the power of its axes.
_MOST_AXES, _MOST_DEVICES = 8, 2**24


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

    def local_bytes(self, mesh: MeshShape) -> int:
        """Bytes of one device's piece."""
        count = 1
        for n in self.sharding.shard_shape(self.shape, mesh):
            count *= n
        return count * item_bytes(self.dtype)


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over the same axes in one step."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    seconds: float

    def verify(self, meshes: Iterable[MeshShape]) -> None:
        """Raise GraphError unless it is a collective over axes of one of the meshes."""
        known = any(set(self.axes) <= set(mesh.names) for mesh in meshes)
        once = len(set(self.axes)) == len(self.axes)
        if self.kind not in COLLECTIVES or not known or not once:
            raise GraphError(f"there is no {self.kind} over {'+'.join(self.axes)} here")
        if min(self.count, self.nbytes, self.seconds) < 0:
            raise GraphError(f"the figures of {self.kind} cannot be negative")


@dataclass(frozen=True)
class Prediction:
    """What one step should take on each device: seconds, traffic, bytes, and when most are held.

    `communication_seconds` are those of all collectives, `exposed_seconds` what of them runs beside
    no work and so is waited for.
    """

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    traffic: tuple[Traffic, ...]
    argument_bytes: int
    peak_bytes: int
    peak: Peak | None = None

    def verify(self, meshes: Sequence[MeshShape]) -> None:
        """Raise GraphError where a figure cannot be, or something is not on these meshes."""
        figures = (
            self.seconds, self.communication_seconds, self.exposed_seconds, self.argument_bytes,
            self.peak_bytes,
        )  # fmt: skip
        if min(figures) < 0:
            raise GraphError("predicted seconds and bytes cannot be negative")
        for traffic in self.traffic:
            traffic.verify(meshes)
        if self.peak is not None:
            self.peak.verify(meshes)

    @property
    def compute_seconds(self) -> float:
        """Seconds of the step in which the device does not wait for communication."""
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True)
class Origin:
    """What a plan was made for: checked when it meets a step, a cluster or a JAX again."""

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
class Plan:
    """Everything that running a step needs, with no solving left.

    A step that is cut into stages or microbatches has a `pipeline`; `sharding` and `mesh` are
    then those of its first submesh. The `record` is the step itself as text: what a plan means is
    told from it, and running does not need it.
    """

    origin: Origin
    sharding: ShardingPlan = field(repr=False)
    arguments: tuple[Argument, ...] = field(repr=False)
    outputs: tuple[Argument, ...] = field(repr=False)
    prediction: Prediction
    layer_count: int = 1
    stage_count: int = 1
    microbatches: int = 1
    recomputation: Recomputation = field(default_factory=Recomputation)
    pipeline: PipelinePlan | None = None
    record: Record | None = field(default=None, repr=False)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The forward values that are computed again for the backward pass."""
        return self.recomputation.values

    @property
    def mesh(self) -> MeshShape:
        """The logical mesh."""
        return self.sharding.mesh

    @property
    def device_count(self) -> int:
        """How many devices the plan is for."""
        return self.mesh.device_count if self.pipeline is None else self.pipeline.device_count

    def mesh_of(self, argument: Argument) -> MeshShape:
        """The logical mesh that an argument lies on."""
        return self.mesh if self.pipeline is None else self.pipeline.mesh_of(argument.submesh)

    @property
    def outcome(self) -> Outcome:
        """What the solver said."""
        return self.sharding.outcome if self.pipeline is None else self.pipeline.outcome

    def check(self) -> None:
        """Raise GraphError unless everything in the plan fits together and its own step.

        Whether the step that it meets later is the same, and whether the plan computes it, is
        checked there.
        """
        pipeline, record = self.pipeline, self.record
        meshes = (self.mesh,) if pipeline is None else tuple(s.mesh for s in pipeline.submeshes)
        for mesh in meshes:
            if len(mesh.names) > _MOST_AXES or mesh.device_count > _MOST_DEVICES:
                raise GraphError(f"no plan is for a mesh ({mesh})")
        if min(self.layer_count, self.stage_count) < 0 or self.microbatches < 1:
            raise GraphError("a step has no fewer than 0 layers and stages, and 1 microbatch")
        again = self.recomputation
        if self.origin.memory_bytes < 1 or min(again.seconds, again.saved_bytes) < 0:
            raise GraphError("the limit, or what is computed again, has figures below 0")
        counts = (min(self.layer_count, 1), 1)  # a step that does nothing has no layer, nor a stage
        if pipeline is not None:
            pipeline.verify()
            if pipeline.shardings[0] != self.sharding:
                raise GraphError("the first submesh has another sharding than the plan")
            counts = (len(pipeline.stages), pipeline.microbatches)
        if counts != (self.stage_count, self.microbatches):
            raise GraphError(
                f"the plan has {self.stage_count} stages and {self.microbatches} microbatches, and "
                f"runs {counts[0]} and {counts[1]}"
            )
        self.prediction.verify(meshes)
        for held in (*self.arguments, *self.outputs):
            if not 0 <= held.submesh < len(meshes):
                raise GraphError(f"{held.path} is on submesh {held.submesh}, which there is not")
            held.verify(meshes[held.submesh])
        if record is not None:
            self._check_record(record)

    def _check_record(self, record: Record) -> None:
        """The same of the step that the plan keeps."""
        batching = record.batching
        batching.verify()
        graph = batching.graph
        if self.pipeline is None:
            if not batching.is_whole:
                raise GraphError("a plan of one program keeps a step in microbatches")
            self.sharding.verify(graph)
            kept = [(i.path, i.value.shape, i.value.dtype, i.role.value) for i in graph.inputs]
            if kept != [(a.path, a.shape, a.dtype, a.role) for a in self.arguments]:
                raise GraphError(f"the arguments are not those of {graph.name}")
            if [graph.value(o).shape for o in graph.outputs] != [o.shape for o in self.outputs]:
                raise GraphError(f"the outputs are not those of {graph.name}")
            return
        if (batching.microbatches, batching.batch) != (
            self.pipeline.microbatches, self.pipeline.batch
        ):  # fmt: skip
            raise GraphError("the step that the plan keeps is cut into other microbatches")
        if self.pipeline.stages[-1].stop > len(graph.ops):
            raise GraphError(f"the stages end after the {len(graph.ops)} ops of {graph.name}")
        for sharding in self.pipeline.shardings:
            sharding.verify_values(graph)

    # The JSON form knows this type, so it is imported where it is asked for.

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
        where = f"({self.mesh})" if self.pipeline is None else f"{self.device_count} devices"
        yield f"plan {o.step} on {o.cluster_name} {where}, {o.method}"
        yield f"  {self.outcome}"
        if self.pipeline is not None:
            yield from (f"  {line}" for line in str(self.pipeline).splitlines())
        yield (
            f"  predicted {show_seconds(p.seconds)} a step, "
            f"{show_seconds(p.exposed_seconds)} of it "
            f"waiting for communication (of {show_seconds(p.communication_seconds)}); "
            f"{show_bytes(p.peak_bytes)} a device"
        )
        if self.recomputed:
            yield f"  {self.recomputation}"
        rows = [
            [t.kind, "+".join(t.axes), f"x{t.count}", show_bytes(t.nbytes), show_seconds(t.seconds)]
            for t in p.traffic
        ]
        yield from columns(rows, "  ")


def arguments_of(graph: Graph, program: SpmdProgram) -> tuple[Argument, ...]:
    """The step's arguments with their shardings."""
    return tuple(
        Argument(i.path, i.value.shape, i.value.dtype, i.role.value, s)
        for i, s in zip(graph.inputs, program.input_shardings, strict=True)
    )


def outputs_of(graph: Graph, program: SpmdProgram) -> tuple[Argument, ...]:
    """The step's outputs with their shardings; state is named by the input that it becomes."""
    returns = dict(graph.donated)
    found: list[Argument] = []
    for o, sharding in enumerate(program.output_shardings):
        value = graph.value(graph.outputs[o])
        path = graph.output_paths[o] if graph.output_paths else ""
        role = Role.STATE.value if o in returns else RESULT
        found.append(Argument(path, value.shape, value.dtype, role, sharding))
    return tuple(found)


def traffic_of(
    program: SpmdProgram, seconds: Mapping[tuple[str, tuple[str, ...]], float]
) -> tuple[Traffic, ...]:
    """Collectives by kind and axes, in a fixed order; `seconds` are of all runs of each."""
    table: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for _, c in program.collectives():
        count, nbytes = table.get((c.kind, c.axes), (0, 0))
        table[c.kind, c.axes] = (count + c.runs, nbytes + c.nbytes * c.runs)
    order = {kind: i for i, kind in enumerate(COLLECTIVES)}
    keys = sorted(table, key=lambda k: (order[k[0]], k[1]))
    return tuple(Traffic(*key, *table[key], seconds.get(key, 0.0)) for key in keys)
