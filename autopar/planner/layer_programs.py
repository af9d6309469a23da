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
from autopar.ir.stages import Stage, StagePlan, Submesh
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
    """A step whose layers are stages of their own, at any size of microbatch.

    It is traced on the rows of one microbatch and of the whole batch; what lies between them, and
    anything else that lies on that line, has sizes in proportion.
    """

    def __init__(self, sliced: SlicedStep, rules: RuleBook) -> None:
        count = len(sliced.layers.layers)
        stages = StagePlan(
            sliced.layers,
            tuple(Stage(i, i, i) for i in range(count)),
            (Submesh(_NO_MESH),) * count,
            sliced.microbatches,
            finest_schedule(sliced.batching.barrier).name,
        )
        self._rules = rules
        self._whole = sliced.trace.whole.graph
        self._parts = split(sliced.batching, stages)
        self._links = PartDataflow.of(sliced.batching, stages, self._parts)
        self._known: dict[tuple[int, int], LayerProgram] = {}
        self.layers = sliced.layers.layers
        self.batching = sliced.batching

    @property
    def rows(self) -> int:
        """Rows of the microbatch that it was traced on."""
        return self.batching.batch // self.batching.microbatches

    def at(self, layer: int, rows: int) -> LayerProgram:
        """A layer with so many rows a microbatch."""
        if (layer, rows) not in self._known:
            self._known[layer, rows] = self._sized(layer, rows)
        return self._known[layer, rows]

    def _sized(self, layer: int, rows: int) -> LayerProgram:
        if rows == self.rows:
            parts = tuple(p for p in self._parts if p.stage == layer)
            return LayerProgram(parts, submesh_graph(self._links, layer))
        traced = self.at(layer, self.rows)
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


@dataclass(frozen=True)
class Line:
    """A number of rows on the line through two others: `share` of the way to the second."""

    share: float

    @classmethod
    def through(cls, low: int, high: int, rows: float) -> Line:
        """The place of `rows` between `low` and `high`, or beyond them."""
        return cls((rows - low) / (high - low) if high > low else 0.0)

    def value(self, first: float, second: float) -> float:
        """The interpolated value if the ends have these; never below zero."""
        return max(0.0, first + self.share * (second - first))
