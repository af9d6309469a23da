"""Where every value of a step lies: registers for what parts make, send, are given and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.graph import Graph
from autopar.ir.program import Feed, Fetch, Part, PartKind
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.spmd import SpmdProgram
from autopar.ir.values import Value
from autopar.passes.lower.links import Links
from autopar.passes.lower.seats import Seat


@dataclass(frozen=True)
class Slot:
    """A value on a submesh: consecutive registers, one a microbatch, or one for the step."""

    submesh: int
    first: int
    count: int
    value: Value
    sharding: Sharding

    def register(self, microbatch: int) -> int:
        """The register of a microbatch; the only one of what is there once."""
        return self.first + (microbatch if self.count > 1 else 0)

    @property
    def registers(self) -> tuple[int, ...]:
        """All of them, in the order of the microbatches."""
        return tuple(range(self.first, self.first + self.count))


Passage = tuple[Slot, Slot]  # from one submesh to another


@dataclass(frozen=True)
class PartWires:
    """The slots that a part reads and writes."""

    inputs: tuple[Slot, ...]
    accumulators: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


class Wires:
    """The slots of a step."""

    def __init__(self, links: Links, listings: Sequence[SpmdProgram]) -> None:
        self._links, self._listings = links, listings
        self._outline = links.outline
        self._microbatches = links.outline.batching.microbatches
        self.register_counts = [0] * len(links.outline.stages.submeshes)
        self._feeds: dict[tuple[int, str, bool], Slot] = {}
        self._received: dict[tuple[int, Slot], Slot] = {}
        self._passages: dict[Slot, list[Slot]] = {}
        self._made = [self._outputs(k) for k in range(len(links.parts))]
        self._summed = {
            (part.submesh, slot.value.name): slot
            for k, part in enumerate(links.parts)
            for slot in self._accumulators(k, part)
        }
        inputs = [self._inputs(k, part) for k, part in enumerate(links.parts)]
        self.fetches = tuple(self._fetches())
        self.parts = tuple(
            PartWires(
                inputs[k],
                tuple(self._summed[part.submesh, a.value] for a in part.accumulators),
                self._made[k],
            )
            for k, part in enumerate(links.parts)
        )

    # -- registers -------------------------------------------------------------------------

    def _new(self, submesh: int, value: Value, sharding: Sharding, looped: bool) -> Slot:
        count = self._microbatches if looped else 1
        first = self.register_counts[submesh]
        self.register_counts[submesh] += count
        return Slot(submesh, first, count, value, sharding)

    def _outputs(self, k: int) -> tuple[Slot, ...]:
        part, looped = self._links.parts[k], Seat.of(self._links.parts[k]).is_looped
        plain = len(part.graph.outputs) - len(part.accumulators)
        lies = self._listings[k].output_shardings
        values = [self._outline.graph.value(o) for o in part.graph.outputs[:plain]]
        return tuple(
            self._new(part.submesh, value, sharding, looped)
            for value, sharding in zip(values, lies, strict=False)
        )

    def _accumulators(self, k: int, part: Part) -> Iterator[Slot]:
        plain = len(part.graph.outputs) - len(part.accumulators)
        lies = self._listings[k].output_shardings[plain:]
        for given, sharding in zip(part.accumulators, lies, strict=True):
            value = self._outline.graph.values[given.value]
            value = replace(value, dtype=given.dtype or value.dtype)
            yield self._new(part.submesh, value, sharding, looped=False)

    # -- what parts read -------------------------------------------------------------------

    def _inputs(self, k: int, part: Part) -> tuple[Slot, ...]:
        lies = self._listings[k].input_shardings
        return tuple(
            self._input(k, part, given.value, sharding)
            for given, sharding in zip(part.graph.inputs, lies, strict=True)
        )

    def _input(self, k: int, part: Part, value: Value, sharding: Sharding) -> Slot:
        if part.kind is PartKind.HOIST:
            return self._feed(part.submesh, value, sharding, whole=True)
        if value.name in self._outline.given:
            home = self._outline.state_home(value.name)
            if home in (-1, part.submesh):
                return self._feed(part.submesh, value, sharding)
            return self._receive(part.submesh, self._state(home, value), sharding)
        maker = self._links.sources[k, value.name]
        if any(a.value == value.name for a in self._links.parts[maker].accumulators):
            return self._summed[part.submesh, value.name]
        made = next(slot for slot in self._made[maker] if slot.value.name == value.name)
        return self._receive(part.submesh, made, sharding)

    def _receive(self, submesh: int, source: Slot, sharding: Sharding) -> Slot:
        """A slot as its submesh reads it, or the copy of it that another one reads."""
        if source.submesh == submesh:
            return source
        if (submesh, source) not in self._received:
            self._received[submesh, source] = self._copied(submesh, source, sharding)
        return self._received[submesh, source]

    def _copied(self, submesh: int, source: Slot, sharding: Sharding) -> Slot:
        """A copy of a slot on another submesh."""
        found = self._new(submesh, source.value, sharding, source.count > 1)
        self._passages.setdefault(source, []).append(found)
        return found

    # -- arguments and outputs -------------------------------------------------------------

    def _feed(self, submesh: int, value: Value, sharding: Sharding, whole: bool = False) -> Slot:
        key = (submesh, value.name, whole)
        if key not in self._feeds:
            looped = not whole and self._is_cut(value.name)
            self._feeds[key] = self._new(submesh, value, sharding, looped)
        return self._feeds[key]

    def _is_cut(self, name: str) -> bool:
        return name in self._outline.batching.rows_of or name == self._outline.batching.index

    def _state(self, home: int, value: Value) -> Slot:
        """A state argument at home."""
        return self._feed(home, value, self._state_sharding(value))

    def _state_sharding(self, value: Value) -> Sharding:
        """How a state argument lies at home: as the parts there read it."""
        return self._state_shardings.get(value.name) or _whole(value)

    @cached_property
    def _state_shardings(self) -> Mapping[str, Sharding]:
        return {
            given.value.name: sharding
            for part, listing in zip(self._links.parts, self._listings, strict=True)
            for given, sharding in zip(part.graph.inputs, listing.input_shardings, strict=True)
            if part.submesh == self._outline.state_home(given.value.name)
            and part.kind is not PartKind.HOIST
        }

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """The arguments on the submeshes that read them, in the order of the arguments."""
        found = [self._fed(*key, slot) for key, slot in self._feeds.items()]
        return tuple(sorted(found, key=lambda f: (f.input, f.submesh, f.registers)))

    def _fed(self, submesh: int, name: str, whole: bool, slot: Slot) -> Feed:
        batching = self._outline.batching
        if whole:
            number = self._hoist_inputs[name]
            return Feed(number, submesh, slot.sharding, slot.registers)
        number = self._outline.input_index[name]
        rows = batching.rows_of.get(name)
        is_index = name == batching.index
        return Feed(number, submesh, slot.sharding, slot.registers, rows, is_index)

    @cached_property
    def _hoist_inputs(self) -> Mapping[str, int]:
        """Which argument each input of the hoist is: the one of its path."""
        paths = [i.path for i in self._outline.graph.inputs]
        hoists = [part for part in self._links.parts if part.kind is PartKind.HOIST]
        return {i.value.name: paths.index(i.path) for part in hoists for i in part.graph.inputs}

    def _fetches(self) -> Iterator[Fetch]:
        graph = self._outline.graph
        for o, output in enumerate(graph.outputs):
            made = o in self._links.returned
            slot = self._returned(o) if made else self._kept(graph, str(output))
            rows = self._outline.batching.rows_of.get(str(output))
            yield Fetch(o, slot.submesh, slot.sharding, slot.registers, rows)

    def _returned(self, output: int) -> Slot:
        """An output where it is made, or a copy of its own where the state is that it replaces."""
        maker = self._links.returned[output]
        part, graph = self._links.parts[maker], self._outline.graph
        operand = graph.outputs[output]
        home = self._outline.return_home.get(output, -1)
        slot = self._made[maker][part.graph.outputs.index(operand)]
        if home < 0:
            return slot
        replaced = graph.inputs[dict(graph.donated)[output]].value
        if home != part.submesh:
            return self._copied(home, slot, self._state_sharding(replaced))
        names = [i.value.name for i in part.graph.inputs]
        return next(
            self._made[maker][o] for o, i in part.graph.donated if names[i] == replaced.name
        )

    def _kept(self, graph: Graph, name: str) -> Slot:
        home = self._outline.state_home(name)
        if home >= 0:
            return self._state(home, graph.values[name])
        fed = [slot for (_, n, whole), slot in self._feeds.items() if n == name and not whole]
        return fed[0] if fed else self._feed(0, graph.values[name], _whole(graph.values[name]))

    # -- what is sent ----------------------------------------------------------------------

    def sends(self, slots: Sequence[Slot]) -> dict[int, list[Passage]]:
        """What of these slots goes to other submeshes, by target."""
        found: dict[int, list[Passage]] = {}
        for slot in slots:
            for target in self._passages.get(slot, ()):
                found.setdefault(target.submesh, []).append((slot, target))
        return dict(sorted(found.items()))

    @property
    def fed(self) -> tuple[Slot, ...]:
        """The slots of arguments, submesh by submesh."""
        return tuple(sorted(self._feeds.values(), key=lambda slot: (slot.submesh, slot.first)))


def _whole(value: Value) -> Sharding:
    return replicated(len(value.shape))
