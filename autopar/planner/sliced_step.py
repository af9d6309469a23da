"""A step cut into microbatches and layers: what stages are priced by and made of.

It is traced on the rows of any number of microbatches. To be priced, each layer is a stage of its
own, at any size of microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

from autopar.errors import BatchError, GraphError, PlanMismatchError
from autopar.frontend import StepSpec, TracedStep
from autopar.frontend.microbatch.batch_inputs import batch_inputs
from autopar.frontend.microbatch.part_trace import (
    MicrobatchTrace,
    split_microbatch,
    trace_microbatch,
)
from autopar.frontend.rewrite.layer_scans import layer_scans
from autopar.frontend.rewrite.rescale import rescale
from autopar.frontend.rewrite.scan_split import Cuts
from autopar.frontend.trace.step import with_state
from autopar.ir.batching import BatchGraphs, Batching
from autopar.ir.graph import Graph, Op
from autopar.ir.plan import Plan
from autopar.ir.plan_file import contents_of
from autopar.ir.program import Part, PartKind, SubmeshGraph
from autopar.ir.resize import Between
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import LayerSequence, Remat, Stage, StagePlan, Submesh
from autopar.ir.values import Input, Value
from autopar.passes.base import Setting
from autopar.passes.batch.exact import OneMicrobatch
from autopar.passes.layer.fixed import Fixed
from autopar.passes.layer.min_cut import MinCut
from autopar.passes.lower.partition.split import Assigned, CutStep
from autopar.passes.lower.partition.submesh_graph import submesh_graph
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.model.merge_isomorphic import unmerged
from autopar.passes.shard.model.read import Readings
from autopar.planner.compatibility import check_plan
from autopar.planner.placed_stages import slice_whole
from autopar.planner.remat import Form, form_of
from autopar.planner.request import Request
from autopar.rules import RuleBook, attach_alike, attach_rules
from autopar.schedule.table import finest_schedule


@dataclass(frozen=True)
class Member:
    """A function that is planned together with a step; it runs `weight` times for each step."""

    source: Source
    weight: float


@dataclass(frozen=True)
class Source:
    """A step with the arguments that it is traced on; traces are kept by number of microbatches.

    With stages, scans over layers are cut into single layers. The `family` are functions of the
    step's state that are planned together with it.
    """

    spec: StepSpec
    args: Sequence[Any]
    kwargs: dict[str, Any]
    traced: TracedStep
    rules: RuleBook
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    family: tuple[Member, ...] = ()
    _known: dict[tuple[int, bool], MicrobatchTrace] = field(
        default_factory=dict[tuple[int, bool], MicrobatchTrace], compare=False, repr=False
    )

    @classmethod
    def of(
        cls, spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any], traced: TracedStep,
        request: Request,
    ) -> Source:  # fmt: skip
        """The source for a request."""
        return cls(spec, args, kwargs, traced, request.rules, request.batch_axes)

    def with_state(self, paths: Collection[str]) -> Source:
        """The source with the inputs of these paths marked as state, which need not come back."""
        traced = with_state(self.traced, paths)
        return self if traced is self.traced else replace(self, traced=traced, _known={})

    @cached_property
    def plain(self) -> Form:
        """The step as it was traced, nothing recomputed."""
        return Form(self.traced, attach_rules(self.traced.graph, self.rules))

    @property
    def rows(self) -> int:
        """Rows of the whole batch; raises BatchError where they cannot be told."""
        return batch_inputs(self.traced, dict(self.batch_axes)).extent

    def trace_at(self, microbatches: int, cut: bool) -> MicrobatchTrace:
        """The step on one of so many microbatches; raises BatchError where there are no such."""
        key = (microbatches, cut)
        if key not in self._known:
            axes = dict(self.batch_axes)
            trace = trace_microbatch(
                self.spec, self.args, self.kwargs, microbatches, axes, self.traced
            )
            self._known[key] = _cut(trace) if cut else trace
        return self._known[key]


def _cut(trace: MicrobatchTrace) -> MicrobatchTrace:
    """Both traces with every scan over layers cut into single layers, in line."""
    scans = layer_scans(trace.whole)
    return split_microbatch(trace, Cuts.everywhere(scans)) if scans else trace


_UNEVEN = 1.5  # of a stage's share of the work, what a layer may have
_IN_STAGES = PassPipeline.of_options(stages=None, microbatches=None)


@dataclass(frozen=True)
class SlicedStep:
    """A step's trace on one microbatch, how microbatches make up the step, and its layers."""

    trace: MicrobatchTrace
    batching: Batching
    layers: LayerSequence

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.batching.microbatches

    def resized(self, microbatches: int, rules: RuleBook) -> SlicedStep | None:
        """The step in other microbatches, between the same layers; None where it must be traced.

        What was found of the rows holds for any number of them. The layers' figures stay those of
        the microbatch that they were cut by.
        """
        trace = self.trace.resized(microbatches, self.batching.batch)
        if trace is None:
            return None
        graph = attach_rules(trace.part.graph, rules)
        return replace(
            self,
            trace=trace,
            batching=replace(self.batching, graph=graph, microbatches=microbatches),
        )


def slice_step(
    trace: MicrobatchTrace,
    rules: RuleBook,
    setting: Setting,
    fewest: int = 1,
    passes: PassPipeline = _IN_STAGES,
) -> SlicedStep:
    """Microbatches and layers of a traced step: those that its structure suggests.

    Where the layer slot leaves their number open, and these are less than the `fewest` that are
    needed or so uneven that they make no such stages, there are `fewest` layers of even work.
    Raises BatchError where the step cannot be cut into these microbatches exactly.
    """
    sliced, layering = slice_at(trace, rules, setting, passes), passes.layer
    if not isinstance(layering, MinCut) or layering.layers is not None:
        return sliced
    if fewest == 1 or _suits(sliced.layers, fewest):
        return sliced
    even = replace(passes, layer=replace(layering, layers=fewest))
    return replace(sliced, layers=even.cut_layers(sliced.batching, setting))


def slice_as_planned(source: Source, plan: Plan, setting: Setting) -> SlicedStep:
    """A step cut and recomputed as a saved plan has it.

    Raises PlanMismatchError where the plan is for another step, or this one cannot be cut so, or
    does not make what is recomputed. A stack of layers that stages share is an argument a layer.
    """
    if plan.is_one_program:
        check_plan(plan, source.traced)
        form = form_of(source.plain, plan.recomputation, source.rules)
        trace = MicrobatchTrace.of_whole(form.traced)
        return SlicedStep(trace, *slice_whole(form.graph, setting))
    try:
        trace = source.trace_at(plan.microbatches, cut=len(plan.stages) > 1)
    except BatchError as error:
        raise PlanMismatchError(
            f"the plan for {plan.origin.step!a} cuts the step into {plan.microbatches} "
            f"microbatches, which cannot be: {error}"
        ) from error
    check_plan(plan, trace.whole)
    with contents_of(plan):
        cuts = Fixed(tuple(stage.stop for stage in plan.stages[:-1]))
        return slice_at(trace, source.rules, setting, replace(_IN_STAGES, layer=cuts))


def _suits(sequence: LayerSequence, stages: int) -> bool:
    """True if layers can make so many stages, none with far more work than its share."""
    work = [layer.flops for layer in sequence.layers]
    return len(work) >= stages and max(work) * stages <= _UNEVEN * sum(work)


def slice_at(
    trace: MicrobatchTrace, rules: RuleBook, setting: Setting, passes: PassPipeline
) -> SlicedStep:
    """The batch and the layer slot on a traced step; raises as `slice_step`."""
    trace, batching = batched(trace, rules, setting, passes)
    return SlicedStep(trace, batching, passes.cut_layers(batching, setting))


def batched(
    trace: MicrobatchTrace, rules: RuleBook, setting: Setting, passes: PassPipeline = _IN_STAGES
) -> tuple[MicrobatchTrace, Batching]:
    """The batching, after factors that may wait until the loop is over were taken out of it."""
    if trace.microbatches == 1:
        passes = replace(passes, batch=OneMicrobatch())
    batching = passes.cut_batch(_graphs(trace, rules), setting)
    while batching.rescales:
        trace = replace(
            trace,
            whole=rescale(trace.whole, batching.rescales),
            part=rescale(trace.part, batching.rescales),
        )
        batching = passes.cut_batch(_graphs(trace, rules), setting)
    return trace, batching


def _graphs(trace: MicrobatchTrace, rules: RuleBook) -> BatchGraphs:
    whole, part = attach_alike((trace.whole.graph, trace.part.graph), rules)
    return BatchGraphs(whole, part, trace.microbatches, trace.index, trace.sources)


_NO_MESH = MeshShape((), ())


@dataclass(frozen=True)
class LayerProgram:
    """A layer as a stage of its own: its parts, and all that it does in a step as one graph."""

    parts: tuple[Part, ...]
    joint: SubmeshGraph

    def without_shared_sums(self) -> LayerProgram:
        """The layer without the additions of scalars that other layers give once a step.

        One layer adds up what all give, as for a global norm. That takes no time and no memory,
        but has two values for each parameter of the step: the layer would be priced for them alone.
        """
        graph, equations = self.joint.graph, self.joint.equations
        once = {e for p in self.parts if not p.is_looped for e in p.equations}
        once -= {e for p in self.parts if p.is_looped for e in p.equations}
        kept = {str(graph.outputs[o]) for o, _ in graph.donated}
        given = {i.value.name for i in graph.inputs if not i.path and i.value.item_count == 1}
        shared: dict[str, int] = {}  # sum -> its equation
        for op, e in zip(graph.ops, equations, strict=True):
            read = op.value_operands
            if op.kind != "add" or e not in once or given.isdisjoint(read):
                continue
            (result,) = op.results
            if result.item_count == 1 and result.name not in kept:
                given.add(result.name)
                shared[result.name] = e
        if not shared:
            return self
        left_out, values = frozenset(shared.values()), graph.values
        return LayerProgram(
            tuple(
                replace(
                    part,
                    graph=_without(part.graph, part.equations, left_out, values),
                    equations=tuple(e for e in part.equations if e not in left_out),
                )
                for part in self.parts
            ),
            replace(
                self.joint,
                graph=_without(graph, equations, left_out, values),
                equations=tuple(e for e in equations if e not in left_out),
            ),
        )


def _without(
    graph: Graph, equations: Sequence[int], left_out: Set[int], values: Mapping[str, Value]
) -> Graph:
    """A graph without some of its ops: what others read of them is given."""
    pairs = list(zip(graph.ops, equations, strict=True))
    gone = {r.name for op, e in pairs if e in left_out for r in op.results}
    ops = tuple(op for op, e in pairs if e not in left_out)
    read = dict.fromkeys(name for op in ops for name in op.value_operands)
    unread = {n for op, e in pairs if e in left_out for n in op.value_operands} - read.keys()
    stays = {graph.inputs[i].value.name for _, i in graph.donated} | set(map(str, graph.outputs))
    inputs = [i for i in graph.inputs if i.value.name not in unread - stays]
    inputs += [Input(values[name]) for name in read if name in gone]
    place = {given.value.name: i for i, given in enumerate(inputs)}
    outputs = [o for o, name in enumerate(graph.outputs) if name not in gone]
    number = {o: n for n, o in enumerate(outputs)}
    return replace(
        graph,
        inputs=tuple(inputs),
        ops=ops,
        outputs=tuple(graph.outputs[o] for o in outputs),
        output_paths=tuple(graph.output_paths[o] for o in outputs) if graph.output_paths else (),
        donated=tuple(
            (number[o], place[graph.inputs[i].value.name]) for o, i in graph.donated if o in number
        ),
    )


class LayerPrograms:
    """A step whose layers are stages of their own, at any size of microbatch and any remat.

    It is traced on the rows of one microbatch and of the whole batch; what lies between them, and
    anything else that lies on that line, has sizes in proportion.
    """

    def __init__(self, sliced: SlicedStep, rules: RuleBook) -> None:
        self._sliced, self._rules = sliced, rules
        self._whole = sliced.trace.whole.graph
        self._cut: dict[Remat, CutStep] = {}
        self._known: dict[tuple[int, int, Remat], LayerProgram] = {}
        # By rows and equation: an op has the same sizes in all graphs that it is in.
        self._ops: dict[tuple[int, int], Op] = {}
        self.layers = sliced.layers.layers
        self.batching = sliced.batching
        self.readings = Readings()

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

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The class of each layer: the first that is like it."""
        return tuple(i if y.same_as < 0 else y.same_as for i, y in enumerate(self.layers))

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """That of most layers, the first of several, and then those of most bytes in their values.

        The first stands for all until it is known that it promises much; what has most bytes is the
        first that a limit leaves nothing.
        """
        first = max(dict.fromkeys(self.homes), key=self.homes.count)

        def value_bytes(layer: int) -> int:
            return sum(v.nbytes for v in self.at(layer, self.rows).joint.graph.values.values())

        others = [c for c in dict.fromkeys(self.homes) if c != first]
        return first, *sorted(others, key=value_bytes, reverse=True)

    def every_reading(self) -> Iterator[Reading]:
        """The readings of all classes of layers."""
        for i, layer in enumerate(self.layers):
            if layer.same_as < 0:
                graph = self.at(i, self.rows).joint.graph
                yield self.readings.of(graph, False, partial(unmerged, graph))

    def _traced(self, layer: int, remat: Remat) -> LayerProgram:
        # Each layer is on a submesh of its own; only those that are asked for are written.
        if remat not in self._cut:
            self._cut[remat] = self._assigned.recomputing(remat).cut()
        dataflow = self._cut[remat].dataflow(layer)
        return LayerProgram(dataflow.parts, submesh_graph(dataflow, layer)).without_shared_sums()

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
        known = (self._ops[rows, e].running(o.runs) for o, e in pairs)
        return replace(graph, inputs=inputs, ops=tuple(known))
