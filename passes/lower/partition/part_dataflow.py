"""Dataflow between the parts of a step: the part that makes each value that another one reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.batching import Batching
from autopar.ir.program import Part, PartKind
from autopar.ir.stages import StagePlan
from autopar.ir.values import Literal
from autopar.passes.lower.partition.part_assignment import BACKWARD_KINDS, PartKey
from autopar.passes.lower.partition.step_analysis import StepAnalysis


@dataclass(frozen=True)
class Makers:
    """The parts that make each value, and those that accumulate it over the microbatches."""

    step: StepAnalysis
    plain: Mapping[str, Sequence[PartKey]]
    accumulating: Mapping[str, PartKey]

    def source(self, name: str, reader: PartKey) -> PartKey:
        """The part whose result a reader takes; raises GraphError if there is none."""
        # A maker on the reader's submesh goes before the accumulator, and that before other
        # submeshes.
        found = _choose_maker(self.plain.get(name, ()), reader)
        # The sum itself is read in place by parts that run once on its submesh, after the loop.
        if found is None or found.submesh != reader.submesh:
            summed = self.accumulating.get(name)
            if summed is not None and self._can_read(summed, reader):
                return summed
        if found is None:
            raise GraphError(f"{self._describe(name)} is read before any part has made it")
        if found.is_looped and not reader.is_looped:
            self._check_once(name)
        return found

    def source_of_output(self, output: int) -> PartKey:
        """The part that makes an output of the step."""
        name = str(self.step.graph.outputs[output])
        return self.source(name, _end_of_step(self.step.return_home.get(output, -1)))

    def _can_read(self, summed: PartKey, reader: PartKey) -> bool:
        same = summed.submesh == reader.submesh
        return same and not reader.is_looped and summed.comes_before(reader)

    def _check_once(self, name: str) -> None:
        """Raise GraphError if a value of each microbatch is read as if there were one."""
        batching = self.step.batching
        if batching.microbatches > 1 and name not in batching.rows_of:
            raise GraphError(
                f"{self._describe(name)} is there once for each of {batching.microbatches} "
                "microbatches, and nothing accumulates it, but it is read once a step"
            )

    def _describe(self, name: str) -> str:
        i = self.step.maker.get(name, -1)
        if i < 0:
            return name
        op = self.step.ops[i]
        where = f" ({op.origin.line})" if op.origin.line else ""
        return f"{name}, which {op.kind}{where} makes,"


def _choose_maker(makers: Iterable[PartKey], reader: PartKey) -> PartKey | None:
    """Choose the maker of a value that a part reads; None if none of them comes before it.

    One of its own submesh; of these one of its own stage, the last before it; else the earliest.
    """
    # In order: own submesh, own stage, not a recomputed copy, latest loop, earliest place in it.
    before = [m for m in makers if m.comes_before(reader)]
    return min(before, key=lambda maker: (*_distance(maker, reader), maker.stage), default=None)


def _distance(maker: PartKey, reader: PartKey) -> tuple[int, ...]:
    first, second = maker.order
    if (maker.submesh, maker.stage) == (reader.submesh, reader.stage):
        return (0, 0, -maker.loop, -first, -second)
    # What another stage recomputes for its backward pass is its own: others read the first copy.
    recomputes = int(maker.kind in BACKWARD_KINDS)
    return (int(maker.submesh != reader.submesh), 1 + recomputes, -maker.loop, first, second)


def _end_of_step(submesh: int) -> PartKey:
    """A key after all parts, for the outputs of a submesh; -1 for whichever submesh has it."""
    return PartKey(PartKind.UPDATE, -1, submesh, loop=1 << 30)


@dataclass(frozen=True)
class PartDataflow:
    """The parts of a step, and the values that pass between them."""

    step: StepAnalysis
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, batching: Batching, stages: StagePlan, parts: tuple[Part, ...]) -> PartDataflow:
        """The dataflow between the parts of a step that `split` has cut."""
        return cls(StepAnalysis.of(batching, stages), parts)

    @cached_property
    def number(self) -> Mapping[PartKey, int]:
        """Key -> the number of its part."""
        return {PartKey.of(part): k for k, part in enumerate(self.parts)}

    @cached_property
    def makers(self) -> Makers:
        """The parts that make each value."""
        plain: dict[str, list[PartKey]] = {}
        summed: dict[str, PartKey] = {}
        for part in self.parts:
            key, own = PartKey.of(part), {a.value for a in part.accumulators}
            for name in dict.fromkeys(part.graph.outputs):
                if isinstance(name, str) and name not in own:
                    plain.setdefault(name, []).append(key)
            summed.update((name, key) for name in own)
        return Makers(self.step, plain, summed)

    def names_read(self, part: Part) -> Iterable[str]:
        """The values that a part reads of other parts."""
        if part.kind is PartKind.HOIST:
            return ()
        given = self.step.given
        return (i.value.name for i in part.graph.inputs if i.value.name not in given)

    @cached_property
    def sources(self) -> Mapping[tuple[int, str], int]:
        """(part, value that it reads of another) -> the other part."""
        return {
            (k, name): self.number[self.makers.source(name, PartKey.of(part))]
            for k, part in enumerate(self.parts)
            for name in self.names_read(part)
        }

    @cached_property
    def output_parts(self) -> Mapping[int, int]:
        """Output of the step -> the part that makes it; inputs that come back have none."""
        made = {o: self.number[self.makers.source_of_output(o)] for o in made_outputs(self.step)}
        return {**made, **{o: self.number[s] for o, s in literal_keys(self.step).items()}}

    @cached_property
    def final(self) -> Mapping[int, frozenset[str]]:
        """Submesh -> the values it makes that are sent or returned: they are never partial sums."""
        found: dict[int, set[str]] = {part.submesh: set() for part in self.parts}
        # Sent to another submesh.
        for (reader, name), maker in self.sources.items():
            if self.parts[maker].submesh != self.parts[reader].submesh:
                found[self.parts[maker].submesh].add(name)
        # Returned by the step.
        for output, maker in self.output_parts.items():
            made = self.step.graph.outputs[output]
            if isinstance(made, str):
                found[self.parts[maker].submesh].add(made)
        return {submesh: frozenset(names) for submesh, names in found.items()}


def literal_keys(step: StepAnalysis) -> dict[int, PartKey]:
    """Output that is a literal -> the part that returns it: round 0 of the last update, at home."""
    last = step.batching.loops - 1
    found: dict[int, PartKey] = {}
    for o, output in enumerate(step.graph.outputs):
        if isinstance(output, Literal):
            home = max(step.return_home.get(o, -1), 0)
            found[o] = PartKey(PartKind.UPDATE, step.first_stage[home], home, last)
    return found


def made_outputs(step: StepAnalysis) -> tuple[int, ...]:
    """The outputs of a step that its parts make: no literals, and no inputs that come back."""
    return tuple(
        o
        for o, name in enumerate(step.graph.outputs)
        if isinstance(name, str) and not step.is_kept(o)
    )
