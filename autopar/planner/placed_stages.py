"""Stages on their submeshes: the parts that they run, one graph a submesh, and the prices there.

    StagePlan    S0 -> mesh0, S1 -> mesh1           which layers run where
    parts        F0 B0 update0 | F1 B1 update1      what each submesh runs, program by program
    graphs       mesh0: F0+B0+update0 | mesh1: ...  what its sharding is decided for, as one graph
    contexts     mesh0 on devices 0..3 | ...        what anything costs there

A step that is one program is one part, and its graph is the step's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.cluster.placement import Block, SubmeshShape, cut_out, submesh_shapes
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.batching import BatchGraphs, Batching
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing
from autopar.ir.plan import Plan
from autopar.ir.program import Part, PartKind, SubmeshGraph
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.soundness import ListingChecker
from autopar.ir.stages import LayerSequence, Stage, StagePlan, Submesh
from autopar.ir.values import item_bytes
from autopar.passes.base import Holding, Pins, Setting
from autopar.passes.lower.listing import OpShardings, lower_graph
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.split import split
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan, submesh_graph
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.schedule.table import in_flight


@dataclass(frozen=True)
class SubmeshContext:
    """A submesh's place: the cluster that it is by itself, its block of devices, and the prices.

    Ops that look alike in listings there, of whichever plan, are sharded and checked once.
    """

    cluster: Cluster
    block: Block
    tables: ReshardCosts
    op_shardings: OpShardings = field(repr=False)
    checker: ListingChecker = field(repr=False)  # that a listing computes what its graph does

    @classmethod
    def of(
        cls, cluster: Cluster, submesh: Submesh, options: CompilerOptions = ()
    ) -> SubmeshContext:
        """A submesh's part of the cluster, where nothing is priced yet.

        Prices are those under compiler options that are put over the chosen ones.
        """
        return SubmeshContexts(cluster, options).of(submesh)

    @property
    def mesh(self) -> MeshShape:
        """The logical mesh."""
        return self.tables.prices.mesh

    @property
    def resharder(self) -> Resharder:
        """Routes from one sharding to another."""
        return self.tables.resharder


class SubmeshContexts:
    """The contexts of a cluster's submeshes; those of one shape and mesh share all prices there.

    They serve as long as plans for the cluster are compared: layers by themselves, and the stages
    that are made of them.
    """

    def __init__(self, cluster: Cluster, options: CompilerOptions = ()) -> None:
        self.cluster, self._options = cluster, options
        self._known: dict[tuple[SubmeshShape | None, MeshShape], SubmeshContext] = {}

    def of(self, submesh: Submesh) -> SubmeshContext:
        """The context of a submesh: the whole cluster where it names no devices."""
        count = len(submesh.devices) or self.cluster.device_count
        shape = next(s for s in submesh_shapes(self.cluster) if s.device_count == count)
        alike = self.at(shape if submesh.devices else None, submesh.mesh)
        return replace(alike, block=Block(min(submesh.devices, default=0), shape))

    def at(self, shape: SubmeshShape | None, mesh: MeshShape) -> SubmeshContext:
        """The context of submeshes of a shape, as if the first of them; None is the cluster."""
        if (shape, mesh) not in self._known:
            own = cut_out(self.cluster, shape) if shape is not None else self.cluster
            whole = shape or submesh_shapes(self.cluster)[-1]
            self._known[shape, mesh] = SubmeshContext(
                own,
                Block(0, whole),
                ReshardCosts(Prices(own, mesh, self._options)),
                OpShardings(),
                ListingChecker(mesh),
            )
        return self._known[shape, mesh]


@dataclass(frozen=True)
class PlacedStages:
    """A batched step whose stages are on submeshes: its parts, and for each submesh its context."""

    cluster: Cluster
    batching: Batching
    stages: StagePlan
    contexts: tuple[SubmeshContext, ...]

    @classmethod
    def of(
        cls, batching: Batching, stages: StagePlan, cluster: Cluster,
        contexts: tuple[SubmeshContext, ...] = (), options: CompilerOptions = (),
    ) -> PlacedStages:  # fmt: skip
        """The parts of the stages, on submeshes where nothing is priced yet, or on those given."""
        stages.verify()
        fresh = SubmeshContexts(cluster, options)
        contexts = contexts or tuple(map(fresh.of, stages.submeshes))
        return cls(cluster, batching, stages, contexts)

    @cached_property
    def dataflow(self) -> PartDataflow:
        """The parts of a step that is several, and what passes between them."""
        return split(self.batching, self.stages)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The programs of the step, in the order in which they first run."""
        if not self.stages.is_one_program:
            return self.dataflow.parts
        graph = self.batching.graph
        return (Part(PartKind.WHOLE, 0, 0, graph, tuple(range(len(graph.ops)))),)

    @cached_property
    def graphs(self) -> tuple[SubmeshGraph, ...]:
        """The parts of each submesh as one graph."""
        if self.stages.is_one_program:
            graph = self.batching.graph
            return (SubmeshGraph(0, graph, tuple(range(len(graph.ops))), (), frozenset()),)
        return tuple(submesh_graph(self.dataflow, k) for k in range(len(self.contexts)))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches whose activations each submesh keeps."""
        if self.stages.is_one_program:
            return (1,)
        chunks, microbatches = self.stages.chunks, self.stages.microbatches
        flying = in_flight(self.stages.schedule, len(self.contexts), microbatches, chunks)
        return tuple(-(-n // chunks) for n in flying)

    def held_often(self, submesh: int) -> dict[str, Holding]:
        """The holding of values of a submesh that is not that of one run.

        Those that are stashed are held for every microbatch in flight. What is set up once is held
        throughout, and so are sums of gradients, which may have more bytes an item than these.
        """
        joint = self.graphs[submesh]
        values = joint.graph.nested_values
        found = dict.fromkeys(joint.stashed, Holding(self.in_flight[submesh]))
        for part in (p for p in self.parts if p.submesh == submesh):
            if part.kind is PartKind.SETUP:
                made = (o for o in map(str, part.graph.outputs) if o in values)
                found.update(dict.fromkeys(made, Holding(throughout=True)))
            for a in part.accumulators:
                dtype = values[a.value].dtype
                times = max(1, item_bytes(a.dtype or dtype) // item_bytes(dtype))
                found[a.value] = Holding(times, throughout=True)
        return found

    def setting(self, submesh: int, pins: Pins, given: Setting) -> Setting:
        """The setting of the shard pass for what a submesh runs."""
        context = self.contexts[submesh]
        return replace(
            given, cluster=context.cluster, mesh=context.mesh, pins=pins,
            held=self.held_often(submesh),
        )  # fmt: skip

    def stages_on(self, submesh: int) -> tuple[int, ...]:
        """The numbers of the stages of a submesh."""
        return tuple(s for s, stage in enumerate(self.stages.stages) if stage.submesh == submesh)

    def runs(self, part: Part) -> int:
        """The number of times that a step runs a part."""
        return self.stages.microbatches if part.is_looped else 1

    def part_sharding(self, part: Part, sharding: ShardingPlan) -> ShardingPlan:
        """The sharding of a part, cut out of that of its submesh."""
        if part.kind is PartKind.WHOLE:
            return sharding
        return part_plan(part, self.graphs[part.submesh], sharding)

    def parts_of(self, stage: int) -> tuple[Part, ...]:
        """The parts of a stage."""
        return tuple(p for p in self.parts if p.stage == stage)

    @cached_property
    def by_mesh(self) -> Mapping[MeshShape, SubmeshContext]:
        """The first context of each mesh: equal meshes share shardings of ops and checks."""
        return {c.mesh: c for c in reversed(self.contexts)}

    def lowered(self, part: Part, sharding: ShardingPlan) -> Listing:
        """The listing of a part where its submesh is sharded so, not checked yet."""
        graph, resharder = self.graphs[part.submesh], self.contexts[part.submesh].resharder
        loose = frozenset[str]() if part.kind is PartKind.WHOLE else left_partial(part, graph)
        own = self.part_sharding(part, sharding)
        op_shardings = self.by_mesh[sharding.mesh].op_shardings
        return lower_graph(part.graph, own, resharder, loose, op_shardings)

    def listing(self, part: Part, sharding: ShardingPlan) -> Listing:
        """The listing of a part where its submesh is sharded so.

        Raises GraphError where that would compute something else than the part.
        """
        listing = self.lowered(part, sharding)
        self.by_mesh[sharding.mesh].checker.check(part.graph, listing)
        return listing


def slice_whole(graph: Graph, setting: Setting) -> tuple[Batching, LayerSequence]:
    """The batch and the layer slot for a step that is left whole: one microbatch, one layer."""
    whole = PassPipeline()
    batching = whole.cut_batch(BatchGraphs(graph, graph, 1), setting)
    return batching, whole.cut_layers(batching, setting)


def place_whole(
    graph: Graph, cluster: Cluster, setting: Setting, context: SubmeshContext | None = None
) -> PlacedStages:
    """A step that is left whole, as one stage on the mesh of a setting: one microbatch, one layer.

    The `context` has what is priced there already.
    """
    batching, layers = slice_whole(graph, setting)
    stages = PassPipeline().one_stage(layers, setting)
    return PlacedStages.of(batching, stages, cluster, (context,) if context is not None else ())


def place_plan(
    plan: Plan, batching: Batching, layers: LayerSequence, cluster: Cluster
) -> PlacedStages:
    """Restores the stages of a saved plan over the layers that its cuts make of a step.

    Raises GraphError where the plan's shardings are none of what the submeshes run.
    """
    stages = StagePlan(
        layers,
        tuple(
            Stage(i, i if layers.layers else -1, s.submesh, s.remat, s.cuts)
            for i, s in enumerate(plan.stages)
        ),
        tuple(s.submesh for s in plan.submeshes),
        plan.microbatches,
        plan.schedule,
    )
    placed = PlacedStages.of(batching, stages, cluster, options=plan.compiler_options)
    for graph, submesh in zip(placed.graphs, plan.submeshes, strict=True):
        submesh.sharding.verify(graph.graph)
    return placed
