"""Dataflow between the parts of a step: the part that makes each value that another one reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.program import Part, PartKind
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
        # 1. A maker on the reader's submesh.
        found = _choose_maker(self.plain.get(name, ()), reader)
        if found is None or found.submesh != reader.submesh:
            # 2. The sum itself, read in place by parts that run once on its submesh after the loop.
            summed = self.accumulating.get(name)
            if summed is not None and summed.submesh == reader.submesh and not reader.is_looped:
                if summed.comes_before(reader):
                    return summed
        # 3. A maker on another submesh.
        if found is None:
            raise GraphError(f"{self._describe(name)} is read before any part has made it")
        # A value of each microbatch cannot be read as if there were one.
        batching = self.step.batching
        is_cut = batching.microbatches > 1 and name not in batching.rows_of
        if found.is_looped and not reader.is_looped and is_cut:
            raise GraphError(
                f"{self._describe(name)} is there once for each of {batching.microbatches} "
                "microbatches, and nothing accumulates it, but it is read once a step"
            )
        return found

    def source_of_output(self, output: int) -> PartKey:
        """The part that makes an output of the step."""
        name = str(self.step.graph.outputs[output])
        # Its reader comes after all parts, on the submesh of the state that it replaces; -1: on
        # whichever submesh has it.
        home = self.step.return_home.get(output, -1)
        return self.source(name, PartKey(PartKind.UPDATE, -1, home, loop=1 << 30))

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
    What another stage recomputes for its backward pass is its own: others read the first copy.
    """

    def distance(maker: PartKey) -> tuple[int, ...]:
        first, second = maker.order
        if (maker.submesh, maker.stage) == (reader.submesh, reader.stage):
            return (0, 0, -maker.loop, -first, -second, maker.stage)
        other, again = maker.submesh != reader.submesh, maker.kind in BACKWARD_KINDS
        return (int(other), 1 + int(again), -maker.loop, first, second, maker.stage)

    return min((m for m in makers if m.comes_before(reader)), key=distance, default=None)


@dataclass(frozen=True)
class PartDataflow:
    """The parts of a step, and the values that pass between them.

    `makers` are the parts that make each value, and `final` the values that each submesh makes and
    sends or returns: they are never partial sums. Both are of the whole step, where `parts` may be
    those of one stage.
    """

    step: StepAnalysis
    parts: tuple[Part, ...]
    makers: Makers
    final: Mapping[int, frozenset[str]]

    @cached_property
    def number(self) -> Mapping[PartKey, int]:
        """Key -> the number of its part."""
        return {PartKey.of(part): k for k, part in enumerate(self.parts)}

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
