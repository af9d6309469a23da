"""Which part makes what another part, or the end of the step, reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.program import Part, PartKind
from autopar.ir.values import Literal
from autopar.passes.lower.outline import Outline
from autopar.passes.lower.seats import Seat, chosen, end_of_step


@dataclass(frozen=True)
class Makers:
    """The seats that make each value, apart from those that add to it microbatch by microbatch."""

    outline: Outline
    plain: Mapping[str, Sequence[Seat]]
    accumulating: Mapping[str, Seat]

    def source(self, name: str, reader: Seat) -> Seat:
        """The seat whose result a reader takes; raises GraphError where there is none."""
        found = chosen(self.plain.get(name, ()), reader)
        if found is None or found.submesh != reader.submesh:
            summed = self.accumulating.get(name)
            if summed is not None and self._can_read(summed, reader):
                return summed
        if found is None:
            raise GraphError(f"{self._told(name)} is read before any part has made it")
        if found.is_looped and not reader.is_looped:
            self._check_once(name)
        return found

    def returned(self, output: int) -> Seat:
        """The seat whose result an output is."""
        name = str(self.outline.graph.outputs[output])
        return self.source(name, end_of_step(self.outline.return_home.get(output, -1)))

    def _can_read(self, summed: Seat, reader: Seat) -> bool:
        same = summed.submesh == reader.submesh
        return same and not reader.is_looped and summed.comes_before(reader)

    def _check_once(self, name: str) -> None:
        """Raise GraphError where a value of each microbatch is read as if there were one."""
        batching = self.outline.batching
        if batching.microbatches > 1 and name not in batching.rows_of:
            raise GraphError(
                f"{self._told(name)} is there once for each of {batching.microbatches} "
                "microbatches, and nothing accumulates it, but it is read once a step"
            )

    def _told(self, name: str) -> str:
        i = self.outline.maker.get(name, -1)
        if i < 0:
            return name
        op = self.outline.ops[i]
        where = f" ({op.origin.line})" if op.origin.line else ""
        return f"{name}, which {op.kind}{where} makes,"


@dataclass(frozen=True)
class Links:
    """The parts of a step with what each reads of which other."""

    outline: Outline
    parts: tuple[Part, ...]

    @cached_property
    def number(self) -> Mapping[Seat, int]:
        """Seat -> the number of its part."""
        return {Seat.of(part): k for k, part in enumerate(self.parts)}

    @cached_property
    def makers(self) -> Makers:
        """Who makes what."""
        plain: dict[str, list[Seat]] = {}
        summed: dict[str, Seat] = {}
        for part in self.parts:
            seat, own = Seat.of(part), {a.value for a in part.accumulators}
            for name in dict.fromkeys(part.graph.outputs):
                if isinstance(name, str) and name not in own:
                    plain.setdefault(name, []).append(seat)
            summed.update((name, seat) for name in own)
        return Makers(self.outline, plain, summed)

    def names_read(self, part: Part) -> Iterable[str]:
        """What a part reads of other parts."""
        if part.kind is PartKind.HOIST:
            return ()
        given = self.outline.given
        return (i.value.name for i in part.graph.inputs if i.value.name not in given)

    @cached_property
    def sources(self) -> Mapping[tuple[int, str], int]:
        """(part, what it reads of another) -> that part."""
        return {
            (k, name): self.number[self.makers.source(name, Seat.of(part))]
            for k, part in enumerate(self.parts)
            for name in self.names_read(part)
        }

    @cached_property
    def returned(self) -> Mapping[int, int]:
        """Output of the step -> the part that makes it; inputs that come back have none."""
        made = {o: self.number[self.makers.returned(o)] for o in made_outputs(self.outline)}
        return {**made, **{o: self.number[s] for o, s in literal_seats(self.outline).items()}}

    @cached_property
    def final(self) -> Mapping[int, frozenset[str]]:
        """Submesh -> what it makes that is sent or returned, so that it is no partial sum."""
        found: dict[int, set[str]] = {part.submesh: set() for part in self.parts}
        for (reader, name), maker in self.sources.items():
            if self.parts[maker].submesh != self.parts[reader].submesh:
                found[self.parts[maker].submesh].add(name)
        for output, maker in self.returned.items():
            made = self.outline.graph.outputs[output]
            if isinstance(made, str):
                found[self.parts[maker].submesh].add(made)
        return {submesh: frozenset(names) for submesh, names in found.items()}


def literal_seats(outline: Outline) -> dict[int, Seat]:
    """The seats that return the outputs that are literals: of the last round 0, at home."""
    last = outline.batching.loops - 1
    found: dict[int, Seat] = {}
    for o, output in enumerate(outline.graph.outputs):
        if isinstance(output, Literal):
            home = max(outline.return_home.get(o, -1), 0)
            found[o] = Seat(PartKind.UPDATE, outline.first_stage[home], home, last)
    return found


def made_outputs(outline: Outline) -> tuple[int, ...]:
    """The outputs of a step that an op or an input of a part is: no literals, nor what is kept."""
    return tuple(
        o
        for o, name in enumerate(outline.graph.outputs)
        if isinstance(name, str) and not outline.is_kept(o)
    )
