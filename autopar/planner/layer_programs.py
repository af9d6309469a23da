"""A step with each layer as a stage of its own, at any size of microbatch, to be priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.program import Part, SubmeshGraph
from autopar.ir.resize import Between
from autopar.ir.stages import Remat, Stage, StagePlan, Submesh
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.split import split
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
            batching, count = self.batching, len(self.layers)
            stages = StagePlan(
                self._sliced.layers,
                tuple(Stage(i, i, i, remat) for i in range(count)),
                (Submesh(_NO_MESH),) * count,
                batching.microbatches,
                finest_schedule(batching.barrier).name,
            )
            self._dataflow[remat] = PartDataflow.of(batching, stages, split(batching, stages))
        return self._dataflow[remat]

    def _sized(self, layer: int, rows: int, remat: Remat) -> LayerProgram:
        traced = self.at(layer, self.rows, remat)
        spare = self.batching.batch - self.rows
        if not spare:
            raise GraphError(f"{self._whole.name} was traced on {self.rows} rows alone")
        sizes = Between(Fraction(rows - self.rows, spare))
        joint = traced.joint
        return LayerProgram(
            tuple(replace(p, graph=self._graph(p.graph, p.equations, sizes)) for p in traced.parts),
            replace(joint, graph=self._graph(joint.graph, joint.equations, sizes)),
        )

    def _graph(self, graph: Graph, equations: Sequence[int], sizes: Between) -> Graph:
        whole = self._whole
        inputs = (
            replace(i, value=sizes.value(i.value, whole.values.get(i.value.name, i.value)))
            for i in graph.inputs
        )
        ops = (sizes.op(o, whole.ops[e]) for o, e in zip(graph.ops, equations, strict=True))
        return attach_rules(replace(graph, inputs=tuple(inputs), ops=tuple(ops)), self._rules)
