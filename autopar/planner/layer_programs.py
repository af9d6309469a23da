"""A step with each layer as a stage of its own, at any size of microbatch, to be priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Op
from autopar.ir.program import Part, PartKind, SubmeshGraph
from autopar.ir.resize import Between
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Remat, Stage, StagePlan, Submesh
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.split import Assigned
from autopar.passes.lower.partition.submesh_graph import submesh_graph
from autopar.planner.sliced_step import SlicedStep
from autopar.rules import RuleBook, attach_rules
from autopar.schedule.table import finest_schedule

_NO_MESH = MeshShape((), ())


@dataclass(frozen=True)
class LayerProgram:
    """A layer as a stage of its own: its parts, and all that it does in a step as one graph."""

    parts: tuple[Part, ...]
    joint: SubmeshGraph


class LayerPrograms:
    """A step whose layers are stages of their own, at any size of microbatch and any remat.

    It is traced on the rows of one microbatch and of the whole batch; what lies between them, and
    anything else that lies on that line, has sizes in proportion.
    """

    def __init__(self, sliced: SlicedStep, rules: RuleBook) -> None:
        self._sliced, self._rules = sliced, rules
        self._whole = sliced.trace.whole.graph
        self._dataflow: dict[Remat, PartDataflow] = {}
        self._known: dict[tuple[int, int, Remat], LayerProgram] = {}
        # By rows and equation: an op has the same sizes in all graphs that it is in.
        self._ops: dict[tuple[int, int], Op] = {}
        self.layers = sliced.layers.layers
        self.batching = sliced.batching

    @property
    def rows(self) -> int:
        """Rows of the microbatch that it was traced on."""
        return self.batching.batch // self.batching.microbatches

    def at(self, layer: int, rows: int, remat: Remat = Remat.NONE) -> LayerProgram:
        """A layer with so many rows a microbatch."""
        key = layer, rows, remat
        if key not in self._known:
            traced = rows == self.rows
            self._known[key] = self._traced(layer, remat) if traced else self._sized(*key)
        return self._known[key]

    def _traced(self, layer: int, remat: Remat) -> LayerProgram:
        dataflow = self._split(remat)
        parts = tuple(p for p in dataflow.parts if p.stage == layer)
        return LayerProgram(parts, submesh_graph(dataflow, layer))

    def _split(self, remat: Remat) -> PartDataflow:
        """The parts of all layers, each on a submesh of its own."""
        if remat not in self._dataflow:
            self._dataflow[remat] = self._assigned.recomputing(remat).split()
        return self._dataflow[remat]

    @cached_property
    def _assigned(self) -> Assigned:
        """The part of every op, whatever the remat."""
        batching, count = self.batching, len(self.layers)
        stages = StagePlan(
            self._sliced.layers,
            tuple(Stage(i, i, i) for i in range(count)),
            (Submesh(_NO_MESH),) * count,
            batching.microbatches,
            finest_schedule(batching.barrier).name,
        )
        return Assigned.of(batching, stages)

    def _sized(self, layer: int, rows: int, remat: Remat) -> LayerProgram:
        traced = self.at(layer, self.rows, remat)
        if self.batching.batch == self.rows:
            raise GraphError(f"{self._whole.name} was traced on {self.rows} rows alone")
        joint = traced.joint
        # The joint graph has the ops of all parts.
        sized = replace(joint, graph=self._graph(joint.graph, joint.equations, rows))
        parts = (
            # A hoist is of the whole batch, whatever its microbatches.
            p
            if p.kind is PartKind.HOIST
            else replace(p, graph=self._graph(p.graph, p.equations, rows))
            for p in traced.parts
        )
        return LayerProgram(tuple(parts), sized)

    def _graph(self, graph: Graph, equations: Sequence[int], rows: int) -> Graph:
        whole = self._whole
        sizes = Between(Fraction(rows - self.rows, self.batching.batch - self.rows))
        inputs = tuple(
            replace(i, value=sizes.value(i.value, whole.values.get(i.value.name, i.value)))
            for i in graph.inputs
        )
        pairs = list(zip(graph.ops, equations, strict=True))
        if any((rows, e) not in self._ops for e in equations):
            ops = tuple(sizes.op(o, whole.ops[e]) for o, e in pairs)
            ruled = attach_rules(replace(graph, inputs=inputs, ops=ops), self._rules)
            self._ops.update({(rows, e): o for e, o in zip(equations, ruled.ops, strict=True)})
            return ruled
        known = (replace(self._ops[rows, e], runs=o.runs) for o, e in pairs)
        return replace(graph, inputs=inputs, ops=tuple(known))
