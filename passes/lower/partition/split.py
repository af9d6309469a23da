"""Split a batched step into parts: graphs that one submesh runs as one program each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import GraphError
from autopar.ir.batching import Accumulator, Batching
from autopar.ir.graph import Graph, Operand
from autopar.ir.program import Part, PartKind
from autopar.ir.stages import Remat, StagePlan
from autopar.ir.values import Input
from autopar.passes.lower.partition.part_assignment import (
    LoopParts,
    OnceParts,
    PartKey,
    assign_loop_ops,
    assign_once_ops,
    recomputed_ops,
)
from autopar.passes.lower.partition.part_dataflow import (
    Makers,
    PartDataflow,
    literal_keys,
    made_outputs,
)
from autopar.passes.lower.partition.step_analysis import StepAnalysis


def split(batching: Batching, stages: StagePlan) -> PartDataflow:
    """Split a step into its parts, in the order in which they first run, and what passes between.

    Raises GraphError if the stages do not suit the schedule, or the batching not the stages.
    """
    return Assigned.of(batching, stages).cut().dataflow()


@dataclass(frozen=True)
class Assigned:
    """A step whose ops have their parts, but for those that stages compute again."""

    step: StepAnalysis
    loops: LoopParts
    once: OnceParts

    @classmethod
    def of(cls, batching: Batching, stages: StagePlan) -> Assigned:
        """The ops of every part; raises GraphError if the stages do not suit the schedule."""
        # 1. The loop, stage and readers of every op.
        step = StepAnalysis.of(batching, stages)
        # 2. The part of every op.
        loops = assign_loop_ops(step)
        return cls(step, loops, assign_once_ops(step, loops.own))

    def recomputing(self, remat: Remat) -> Assigned:
        """The same where every stage recomputes so."""
        return replace(self, step=self.step.recomputing(remat))

    def cut(self) -> CutStep:
        """The ops and values of every part; raises GraphError if the batching does not suit."""
        # 3. All ops of every part, what it computes again among them.
        contents = _contents(self)
        # 4. The values that leave every part: other parts or the end of the step read them.
        leaving, final = _leaving(self.step, contents)
        return CutStep(self.step, contents, leaving, final)


@dataclass(frozen=True)
class CutStep:
    """A step whose parts are known, but not yet written as graphs."""

    step: StepAnalysis
    contents: _Contents
    leaving: Mapping[PartKey, _Leaving]
    final: Mapping[int, frozenset[str]]  # by submesh, as in a dataflow

    def dataflow(self, stage: int | None = None) -> PartDataflow:
        """The parts of all stages, or of one alone, where no other is asked for."""
        contents, hoist = self.contents, self.step.batching.hoist
        # 5. A graph for every part.
        parts = [
            _build(self.step, contents, key, self.leaving[key])
            for key in sorted(contents.ops, key=lambda key: key.row)
            if stage is None or key.stage == stage
        ]
        for part in parts:
            part.graph.verify()
        hoists = [
            Part(key.kind, key.stage, key.submesh, hoist.graph, hoist.equations)
            for key in contents.hoist_keys
            if hoist is not None and (stage is None or key.stage == stage)
        ]
        return PartDataflow(self.step, (*hoists, *parts), contents.makers, self.final)


@dataclass(frozen=True)
class _Contents:
    """The ops, passed values and accumulators of every part, and the makers of every value."""

    ops: Mapping[PartKey, Sequence[int]]
    passed: Mapping[PartKey, Sequence[str]]
    accumulators: Mapping[PartKey, tuple[Accumulator, ...]]
    makers: Makers
    hoist_keys: tuple[PartKey, ...]


def _contents(assigned: Assigned) -> _Contents:
    # A part is its own ops, those it recomputes, and values that it only passes on; the outputs
    # that are literals need a part too.
    step, loops, once = assigned.step, assigned.loops, assigned.once
    again = dict(recomputed_ops(step, loops))
    own = {**loops.own, **once.ops, **{s: once.ops.get(s, []) for s in once.passed}}
    own.update((s, own.get(s, [])) for s in literal_keys(step).values())
    ops = {key: sorted({*mine, *again.get(key, ())}) for key, mine in own.items()}
    # An accumulator is made by the part that adds to it, and by no other: readers take the sum.
    accumulator_of = step.batching.accumulator_of
    summed: dict[PartKey, tuple[Accumulator, ...]] = {}
    for key, mine in loops.own.items():
        made = (accumulator_of.get(r.name) for i in mine for r in step.ops[i].results)
        summed[key] = tuple(a for a in made if a is not None and a.loop == key.loop)
    # Any other value is made by all parts that have its op.
    plain: dict[str, list[PartKey]] = {}
    for key in ops:
        added = {a.value for a in summed.get(key, ())}
        results = [r.name for i in ops[key] for r in step.ops[i].results]
        for name in (*results, *once.passed.get(key, ())):
            if name not in added and name not in step.hoisted:
                plain.setdefault(name, []).append(key)
    # A hoisted value comes from the hoist alone, whatever op of the graph makes it. The hoist is on
    # the submesh that reads it first.
    readers = [
        key
        for key, mine in ops.items()
        if any(not step.hoisted.isdisjoint(step.reads[i]) for i in mine)
    ]
    hoist_keys: tuple[PartKey, ...] = ()
    if readers or not step.hoisted.isdisjoint(map(str, step.graph.outputs)):
        first = min(readers, key=lambda key: key.row, default=PartKey(PartKind.HOIST, 0, 0))
        hoist_keys = (PartKey(PartKind.HOIST, first.stage, first.submesh),)
    plain.update((name, list(hoist_keys)) for name in step.hoisted)
    accumulating = {a.value: key for key, found in summed.items() for a in found}
    makers = Makers(step, plain, accumulating)
    return _Contents(ops, once.passed, summed, makers, hoist_keys)


# -- values that leave a part ----------------------------------------------------------------


@dataclass(frozen=True)
class _Leaving:
    """The values of one part that others read, and the outputs of the step that it makes."""

    names: set[str]
    outputs: list[int]


def _leaving(
    step: StepAnalysis, contents: _Contents
) -> tuple[dict[PartKey, _Leaving], dict[int, frozenset[str]]]:
    """The values that leave each part; by submesh, those that are sent to another or returned."""
    batching = step.batching
    found = {key: _Leaving(set(), []) for key in (*contents.ops, *contents.hoist_keys)}
    final: dict[int, set[str]] = {key.submesh: set() for key in found}
    for key, ops in contents.ops.items():
        # A value that crosses from part to part is an output of its maker: `source` says which.
        made = {r.name for i in ops for r in step.ops[i].results} - step.hoisted
        read = dict.fromkeys(n for i in ops for n in step.reads[i] if n not in made)
        for name in (*read, *contents.passed.get(key, ())):
            if name not in step.given:
                source = contents.makers.source(name, key)
                found[source].names.add(name)
                if source.submesh != key.submesh:
                    final[source.submesh].add(name)
                continue
            is_cut = name in batching.rows_of or name == batching.index
            if is_cut and not key.is_looped and batching.microbatches > 1:
                raise GraphError(
                    f"input {name} is cut into {batching.microbatches} microbatches, but read once "
                    "a step"
                )
    # Outputs of the step leave the part that makes them, or are literals of the last update.
    for output, key in literal_keys(step).items():
        found[key].outputs.append(output)
    for output in made_outputs(step):
        source = contents.makers.source_of_output(output)
        found[source].outputs.append(output)
        final[source.submesh].add(str(step.graph.outputs[output]))
    return found, {submesh: frozenset(names) for submesh, names in final.items()}


# -- one part --------------------------------------------------------------------------------


def _build(step: StepAnalysis, contents: _Contents, key: PartKey, leaving: _Leaving) -> Part:
    """Build a part, given the values that are read of it.

        inputs     arguments of the step in their order, then values of other parts
        outputs    values that others read | new state, literals | sums over microbatches

    New state has an output of its own beside the one that other parts read, as it must have the
    sharding of the state that it replaces. That state is an input even if nothing reads it, so that
    its buffer can be handed over.
    """
    # 1. Its ops, with copies of the cheap ones that it reads (`is_repeated`), down to values that
    #    it is sent.
    members, left = set(contents.ops[key]), list(contents.ops[key])
    while left:
        for name in step.ops[left.pop()].value_operands:
            j = step.maker.get(name, -1)
            if j >= 0 and step.is_repeated[j] and j not in members:
                members.add(j)
                left.append(j)
    ops = sorted(members)
    passed = contents.passed.get(key, ())
    # 2. Outputs: first values that others read, each once, though several outputs of the step may
    #    be it.
    accumulators = contents.accumulators.get(key, ())
    summed = [a.value for a in accumulators]
    returns = dict(step.graph.donated)
    replaced = {
        o: step.graph.inputs[returns[o]]
        for o in leaving.outputs
        if step.return_home.get(o) == key.submesh
    }
    returned = {o: step.graph.outputs[o] for o in leaving.outputs}
    others = {n for o, n in returned.items() if o not in replaced and isinstance(n, str)}
    wanted = (leaving.names | others).difference(summed)
    made = [r.name for i in ops for r in step.ops[i].results]
    shared = list(dict.fromkeys(n for n in (*made, *passed) if n in wanted))
    outputs: list[Operand] = list(shared)
    # Then outputs of the step: new state and literals have places of their own.
    places: dict[int, int] = {}  # output of the step -> output of the part
    for output, operand in returned.items():
        if isinstance(operand, str) and output not in replaced:
            places[output] = shared.index(operand)
        else:
            places[output] = len(outputs)
            outputs.append(operand)
    outputs += summed
    paths: list[str] = []
    if step.graph.output_paths and places:
        path_at = {place: step.graph.output_paths[output] for output, place in places.items()}
        paths = [path_at.get(place, "") for place in range(len(outputs))]
    # 3. Inputs: the state that is replaced, and what is read before it is made here.
    inputs = dict.fromkeys(state.value.name for state in replaced.values())
    here: set[str] = set()
    for i in ops:
        inputs.update((n, None) for n in step.ops[i].value_operands if n not in here)
        here.update(r.name for r in step.ops[i].results if r.name not in step.hoisted)
    inputs.update((name, None) for name in passed)
    ordered = sorted(inputs, key=lambda n: step.input_index.get(n, 1 << 30))
    values = step.graph.values
    graph = Graph(
        "",
        tuple(step.given.get(n, Input(values[n])) for n in ordered),
        tuple(step.ops[i] for i in ops),
        tuple(outputs),
        tuple(paths),
        tuple((places[o], ordered.index(state.value.name)) for o, state in replaced.items()),
    )
    part = Part(
        key.kind, key.stage, key.submesh, graph, tuple(ops), key.loop, key.round, accumulators
    )
    return replace(part, graph=replace(graph, name=f"{step.graph.name}.{part.name}"))
