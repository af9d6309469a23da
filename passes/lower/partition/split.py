"""Split a batched step into parts: graphs that one submesh runs as one program each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import GraphError
from autopar.ir.batching import Accumulator, Batching
from autopar.ir.graph import Graph, Operand
from autopar.ir.program import Part, PartKind
from autopar.ir.stages import StagePlan
from autopar.ir.values import Input
from autopar.passes.lower.partition.part_assignment import PartKey, assign_loop_ops, assign_once_ops
from autopar.passes.lower.partition.part_dataflow import Makers, literal_keys, made_outputs
from autopar.passes.lower.partition.step_analysis import StepAnalysis


def split(batching: Batching, stages: StagePlan) -> tuple[Part, ...]:
    """Split a step into its parts, in the order in which they first run.

    Raises GraphError if the stages do not suit the schedule, or the batching not the stages.
    """
    # 1. The loop, stage and readers of every op.
    step = StepAnalysis.of(batching, stages)
    # 2. The ops of every part.
    contents = _contents(step)
    # 3. The values that leave every part: other parts or the end of the step read them.
    leaving = _leaving(step, contents)
    # 4. A graph for every part.
    parts = [
        _Builder(step, contents, key).part(leaving[key])
        for key in sorted(contents.ops, key=lambda key: key.row)
    ]
    hoist = [_hoist_part(step, key) for key in contents.hoist_keys]
    for part in parts:
        part.graph.verify()
    return (*hoist, *parts)


@dataclass(frozen=True)
class _Contents:
    """The ops, passed values and accumulators of every part, and the makers of every value."""

    ops: Mapping[PartKey, Sequence[int]]
    passed: Mapping[PartKey, Sequence[str]]
    accumulators: Mapping[PartKey, tuple[Accumulator, ...]]
    makers: Makers
    hoist_keys: tuple[PartKey, ...]


def _contents(step: StepAnalysis) -> _Contents:
    # A part is its own ops, those it recomputes, and values that it only passes on; the outputs
    # that are literals need a part too.
    loops = assign_loop_ops(step)
    once = assign_once_ops(step, loops.own)
    own = {**loops.own, **once.ops, **{s: once.ops.get(s, []) for s in once.passed}}
    own.update((s, own.get(s, [])) for s in literal_keys(step).values())
    ops = {key: sorted({*mine, *loops.again.get(key, ())}) for key, mine in own.items()}
    # An accumulator is made by the part that adds to it, and by no other: readers take the sum.
    summed = {key: tuple(_accumulators(step, key, mine)) for key, mine in loops.own.items()}
    hoist_keys = _hoist_keys(step, ops)
    plain: dict[str, list[PartKey]] = {}
    for key in ops:
        added = {a.value for a in summed.get(key, ())}
        made = [r.name for i in ops[key] for r in step.ops[i].results]
        for name in (*made, *once.passed.get(key, ())):
            if name not in added and name not in step.hoisted:
                plain.setdefault(name, []).append(key)
    # A hoisted value comes from the hoist alone, whatever op of the graph makes it.
    plain.update((name, list(hoist_keys)) for name in step.hoisted)
    accumulating = {a.value: key for key, found in summed.items() for a in found}
    makers = Makers(step, plain, accumulating)
    return _Contents(ops, once.passed, summed, makers, hoist_keys)


def _accumulators(step: StepAnalysis, key: PartKey, ops: Iterable[int]) -> Iterator[Accumulator]:
    for i in ops:
        for result in step.ops[i].results:
            found = step.batching.accumulator_of.get(result.name)
            if found is not None and found.loop == key.loop:
                yield found


# -- the hoist -------------------------------------------------------------------------------


def _hoist_keys(step: StepAnalysis, ops: Mapping[PartKey, Sequence[int]]) -> tuple[PartKey, ...]:
    """The key of the hoist, if there is one: on the submesh that reads it first."""
    readers = [
        key
        for key, mine in ops.items()
        if any(not step.hoisted.isdisjoint(step.reads[i]) for i in mine)
    ]
    if not readers and step.hoisted.isdisjoint(map(str, step.graph.outputs)):
        return ()
    first = min(readers, key=lambda key: key.row, default=PartKey(PartKind.HOIST, 0, 0))
    return (PartKey(PartKind.HOIST, first.stage, first.submesh),)


def _hoist_part(step: StepAnalysis, key: PartKey) -> Part:
    hoist = step.batching.hoist
    assert hoist is not None
    return Part(key.kind, key.stage, key.submesh, hoist.graph, hoist.equations)


# -- values that leave a part ----------------------------------------------------------------


@dataclass(frozen=True)
class _Leaving:
    """The values of one part that others read, and the outputs of the step that it makes."""

    names: set[str]
    outputs: list[int]


def _leaving(step: StepAnalysis, contents: _Contents) -> dict[PartKey, _Leaving]:
    found = {key: _Leaving(set(), []) for key in (*contents.ops, *contents.hoist_keys)}
    for key, ops in contents.ops.items():
        # A value that crosses from part to part is an output of its maker: `source` says which.
        made = {r.name for i in ops for r in step.ops[i].results} - step.hoisted
        read = dict.fromkeys(n for i in ops for n in step.reads[i] if n not in made)
        for name in (*read, *contents.passed.get(key, ())):
            if name in step.given:
                _check_rows(step, key, name)
            else:
                found[contents.makers.source(name, key)].names.add(name)
    # Outputs of the step leave the part that makes them, or are literals of the last update.
    for output, key in literal_keys(step).items():
        found[key].outputs.append(output)
    for output in made_outputs(step):
        found[contents.makers.source_of_output(output)].outputs.append(output)
    return found


def _check_rows(step: StepAnalysis, key: PartKey, name: str) -> None:
    batching = step.batching
    is_cut = name in batching.rows_of or name == batching.index
    if is_cut and not key.is_looped and batching.microbatches > 1:
        raise GraphError(
            f"input {name} is cut into {batching.microbatches} microbatches, but read once a step"
        )


# -- one part --------------------------------------------------------------------------------


class _Builder:
    """Builds the graph of one part."""

    def __init__(self, step: StepAnalysis, contents: _Contents, key: PartKey) -> None:
        self._step, self._contents, self._key = step, contents, key
        # Each part has copies of the cheap ops that it reads (`is_repeated`), down to values it is
        # sent.
        self._ops = sorted(self._add_repeated(contents.ops[key]))
        self._inputs: dict[str, Input] = {}
        self._outputs: list[Operand] = []
        self._places: dict[int, int] = {}  # output of the step -> output of the part

    def part(self, leaving: _Leaving) -> Part:
        """Build the part, given the values that are read of it."""
        step, key = self._step, self._key
        accumulators = self._contents.accumulators.get(key, ())
        summed = [a.value for a in accumulators]
        donated = self._return(leaving, frozenset(summed))
        self._read()
        ordered = sorted(self._inputs, key=lambda n: step.input_index.get(n, 1 << 30))
        part = Part(
            key.kind, key.stage, key.submesh,
            Graph("", tuple(self._inputs[n] for n in ordered),
                  tuple(step.ops[i] for i in self._ops), (*self._outputs, *summed),
                  self._paths(len(summed)), tuple((o, ordered.index(n)) for o, n in donated)),
            tuple(self._ops), key.loop, key.round, accumulators,
        )  # fmt: skip
        return replace(part, graph=replace(part.graph, name=f"{step.graph.name}.{part.name}"))

    def _add_repeated(self, ops: Sequence[int]) -> set[int]:
        step, found, left = self._step, set(ops), list(ops)
        while left:
            for name in step.ops[left.pop()].value_operands():
                j = step.maker.get(name, -1)
                if j >= 0 and step.is_repeated[j] and j not in found:
                    found.add(j)
                    left.append(j)
        return found

    def _return(self, leaving: _Leaving, summed: frozenset[str]) -> list[tuple[int, str]]:
        """Collect the outputs; gives back (output of the part, the state input that it replaces).

        New state has an output of its own beside the one that other parts read, as it must have
        the sharding of the state that it replaces. That state is an input even if nothing reads it.
        """
        step, returns = self._step, dict(self._step.graph.donated)
        replacing = {
            o: step.graph.inputs[returns[o]]
            for o in leaving.outputs
            if step.return_home.get(o) == self._key.submesh
        }
        given = {o: step.graph.outputs[o] for o in leaving.outputs}
        others = {n for o, n in given.items() if o not in replacing and isinstance(n, str)}
        wanted = (leaving.names | others) - summed
        made = [r.name for i in self._ops for r in step.ops[i].results]
        passed = self._contents.passed.get(self._key, ())
        # Values that others read come first, each once, though several outputs of the step may be
        # it.
        shared = list(dict.fromkeys(n for n in (*made, *passed) if n in wanted))
        self._outputs = list(shared)
        # Then outputs of the step: new state and literals have places of their own.
        for output, operand in given.items():
            if isinstance(operand, str) and output not in replacing:
                self._places[output] = shared.index(operand)
            else:
                self._places[output] = len(self._outputs)
                self._outputs.append(operand)
        # The old state comes in, so that its buffer can be handed over to the new one.
        for state in replacing.values():
            self._inputs[state.value.name] = state
        return [(self._places[o], state.value.name) for o, state in replacing.items()]

    def _read(self) -> None:
        step = self._step
        made: set[str] = set()
        for i in self._ops:
            # Inputs are what is read before it is made here.
            for name in step.ops[i].value_operands():
                if name not in made:
                    self._take(name)
            made.update(r.name for r in step.ops[i].results if r.name not in step.hoisted)
        for name in self._contents.passed.get(self._key, ()):
            self._take(name)

    def _take(self, name: str) -> None:
        value = self._step.graph.values[name]
        self._inputs.setdefault(name, self._step.given.get(name, Input(value)))

    def _paths(self, summed: int) -> tuple[str, ...]:
        paths = self._step.graph.output_paths
        if not paths or not self._places:
            return ()
        found = [""] * (len(self._outputs) + summed)
        for output, place in self._places.items():
            found[place] = paths[output]
        return tuple(found)
