"""Registers of every submesh: their allocation to values, and the point where each is freed.

A register is written once a step, so that allocation is a count and no colouring. A value of a
loop has a slot of m registers, one a microbatch; any other value has a slot of one.

    mesh0   r0..r3  x of microbatches 0..3   r4 w   r5..r8  a of microbatches 0..3
    mesh1   r0..r3  a, received              r4 sum of dw, an accumulator
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.listing import Listing
from autopar.ir.program import Feed, Fetch, Free, Instruction, Part, PartKind, Run, Send, Start
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.values import Role, Value
from autopar.passes.lower.partition.part_assignment import PartKey
from autopar.passes.lower.partition.part_dataflow import PartDataflow


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
        """Its registers, in the order of the microbatches."""
        return tuple(range(self.first, self.first + self.count))


Passage = tuple[Slot, Slot]  # from one submesh to another


@dataclass(frozen=True)
class SlotRow:
    """The registers of some slots, of which those at places `many` have one a microbatch."""

    first: tuple[int, ...]
    many: tuple[int, ...]

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> SlotRow:
        """The row of some slots."""
        many = tuple(p for p, slot in enumerate(slots) if slot.count > 1)
        return cls(tuple(slot.first for slot in slots), many)

    def at(self, microbatch: int) -> tuple[int, ...]:
        """The register of each slot for a microbatch."""
        row = list(self.first)
        for p in self.many:
            row[p] += microbatch
        return tuple(row)


@dataclass(frozen=True)
class PartRows:
    """The registers that a part reads and writes."""

    inputs: SlotRow
    accumulators: SlotRow
    outputs: SlotRow


@dataclass(frozen=True)
class PartSlots:
    """The slots that a part reads and writes."""

    inputs: tuple[Slot, ...]
    accumulators: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @cached_property
    def rows(self) -> PartRows:
        """The same as registers."""
        return PartRows(*map(SlotRow.of, (self.inputs, self.accumulators, self.outputs)))


class RegisterAllocation:
    """The slots of a step: of results and accumulators first, then of all that is read."""

    def __init__(self, dataflow: PartDataflow, listings: Sequence[Listing]) -> None:
        self._dataflow, self._listings = dataflow, listings
        self._step = dataflow.step
        self._microbatches = dataflow.step.batching.microbatches
        self.register_counts = [0] * len(dataflow.step.stages.submeshes)
        self._feeds: dict[tuple[int, str, bool], Slot] = {}
        self._received: dict[tuple[int, Slot], Slot] = {}
        self._passages: dict[Slot, list[Slot]] = {}
        # 1. Slots for all results, then for accumulators, which several parts may read and write. A
        #    part returns its sums last.
        graph, listed = dataflow.step.graph, list(zip(dataflow.parts, listings, strict=True))
        self._made: list[tuple[Slot, ...]] = []
        for part, listing in listed:
            plain = len(part.graph.outputs) - len(part.accumulators)
            values = [graph.value(o) for o in part.graph.outputs[:plain]]
            self._made.append(
                tuple(
                    self._new(part.submesh, value, sharding, PartKey.of(part).is_looped)
                    for value, sharding in zip(values, listing.output_shardings, strict=False)
                )
            )
        self._summed: dict[tuple[int, str], Slot] = {}
        for part, listing in listed:
            shardings = listing.output_shardings[len(part.graph.outputs) - len(part.accumulators) :]
            for given, sharding in zip(part.accumulators, shardings, strict=True):
                value = graph.values[given.value]
                value = replace(value, dtype=given.dtype or value.dtype)
                slot = self._new(part.submesh, value, sharding, looped=False)
                self._summed[part.submesh, given.value] = slot
        # 2. Slots for inputs: of results on the same submesh, of copies, of arguments.
        inputs = [
            tuple(
                self._input(k, part, argument.value, sharding)
                for argument, sharding in zip(
                    part.graph.inputs, listing.input_shardings, strict=True
                )
            )
            for k, (part, listing) in enumerate(listed)
        ]
        # 3. Slots for outputs: new state goes where the old state lives.
        fetches: list[Fetch] = []
        for o, output in enumerate(graph.outputs):
            made = o in dataflow.output_parts
            slot = self._output_slot(o) if made else self._kept_slot(graph.values[str(output)])
            rows = dataflow.step.batching.rows_of.get(str(output))
            fetches.append(Fetch(o, slot.submesh, slot.sharding, slot.registers, rows))
        self.fetches = tuple(fetches)
        self.parts = tuple(
            PartSlots(
                inputs[k],
                tuple(self._summed[part.submesh, a.value] for a in part.accumulators),
                self._made[k],
            )
            for k, part in enumerate(dataflow.parts)
        )

    # -- registers -------------------------------------------------------------------------

    def _new(self, submesh: int, value: Value, sharding: Sharding, looped: bool) -> Slot:
        count = self._microbatches if looped else 1
        first = self.register_counts[submesh]
        self.register_counts[submesh] += count
        return Slot(submesh, first, count, value, sharding)

    # -- inputs of parts -------------------------------------------------------------------

    def _input(self, k: int, part: Part, value: Value, sharding: Sharding) -> Slot:
        if part.kind is PartKind.HOIST:
            return self._feed(part.submesh, value, sharding, whole=True)
        if value.name in self._step.given:
            # State lives on one submesh; others that read it get a copy when the step starts.
            home = self._step.state_home(value.name)
            if home in (-1, part.submesh):
                return self._feed(part.submesh, value, sharding)
            return self._receive(part.submesh, self._state(home, value), sharding)
        # A result of another part: its slot, the sum's slot, or the copy that this submesh is sent.
        maker = self._dataflow.sources[k, value.name]
        if any(a.value == value.name for a in self._dataflow.parts[maker].accumulators):
            return self._summed[part.submesh, value.name]
        made = next(slot for slot in self._made[maker] if slot.value.name == value.name)
        return self._receive(part.submesh, made, sharding)

    def _receive(self, submesh: int, source: Slot, sharding: Sharding) -> Slot:
        """The slot itself on its own submesh, else the copy that another submesh receives."""
        if source.submesh == submesh:
            return source
        if (submesh, source) not in self._received:
            self._received[submesh, source] = self._copy_to(submesh, source, sharding)
        return self._received[submesh, source]

    def _copy_to(self, submesh: int, source: Slot, sharding: Sharding) -> Slot:
        """A copy of a slot on another submesh."""
        found = self._new(submesh, source.value, sharding, source.count > 1)
        self._passages.setdefault(source, []).append(found)
        return found

    # -- arguments and outputs -------------------------------------------------------------

    def _feed(self, submesh: int, value: Value, sharding: Sharding, whole: bool = False) -> Slot:
        key = (submesh, value.name, whole)
        if key not in self._feeds:
            batching = self._step.batching
            is_cut = value.name in batching.rows_of or value.name == batching.index
            self._feeds[key] = self._new(submesh, value, sharding, is_cut and not whole)
        return self._feeds[key]

    def _state(self, home: int, value: Value) -> Slot:
        """A state argument at home."""
        return self._feed(home, value, self._state_sharding(value))

    def _state_sharding(self, value: Value) -> Sharding:
        """The sharding of a state argument at home: the one in which the parts there read it."""
        return self._state_shardings.get(value.name) or _whole(value)

    @cached_property
    def _state_shardings(self) -> Mapping[str, Sharding]:
        return {
            given.value.name: sharding
            for part, listing in zip(self._dataflow.parts, self._listings, strict=True)
            for given, sharding in zip(part.graph.inputs, listing.input_shardings, strict=True)
            if part.submesh == self._step.state_home(given.value.name)
            and part.kind is not PartKind.HOIST
        }

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """The arguments on the submeshes that read them, in the order of the arguments."""
        batching = self._step.batching
        # An input of the hoist is the whole of the argument with the same path.
        paths = [i.path for i in self._step.graph.inputs]
        hoists = [part for part in self._dataflow.parts if part.kind is PartKind.HOIST]
        hoisted = {i.value.name: paths.index(i.path) for part in hoists for i in part.graph.inputs}
        found: list[Feed] = []
        for (submesh, name, whole), slot in self._feeds.items():
            number = hoisted[name] if whole else self._step.input_index[name]
            rows = None if whole else batching.rows_of.get(name)
            is_index = name == batching.index and not whole
            found.append(Feed(number, submesh, slot.sharding, slot.registers, rows, is_index))
        return tuple(sorted(found, key=lambda f: (f.input, f.submesh, f.registers)))

    def _output_slot(self, output: int) -> Slot:
        """The slot of an output where it is made; of new state, where the old state lives."""
        maker = self._dataflow.output_parts[output]
        part, graph = self._dataflow.parts[maker], self._step.graph
        home = self._step.return_home.get(output, -1)
        replaced = self._replaced.get(output, "")
        if home == part.submesh:
            return self._made[maker][self._returned[maker][replaced]]
        slot = self._made[maker][part.graph.outputs.index(graph.outputs[output])]
        if home < 0:
            return slot
        # Made on another submesh than the old state: sent home.
        return self._copy_to(home, slot, self._state_sharding(graph.values[replaced]))

    @cached_property
    def _replaced(self) -> Mapping[int, str]:
        """Output of the step -> the state that it replaces."""
        graph = self._step.graph
        return {o: graph.inputs[i].value.name for o, i in graph.donated}

    @cached_property
    def _returned(self) -> Sequence[Mapping[str, int]]:
        """For each part: state that it replaces -> the output that does."""
        graphs = [part.graph for part in self._dataflow.parts]
        return [{g.inputs[i].value.name: o for o, i in g.donated} for g in graphs]

    def _kept_slot(self, value: Value) -> Slot:
        """The slot of an input that comes back as it is."""
        home = self._step.state_home(value.name)
        if home >= 0:
            return self._state(home, value)
        fed = [s for (_, name, whole), s in self._feeds.items() if name == value.name and not whole]
        return fed[0] if fed else self._feed(0, value, _whole(value))

    # -- sends -----------------------------------------------------------------------------

    def sends(self, slots: Sequence[Slot]) -> dict[int, list[Passage]]:
        """Target submesh -> those of these slots that are sent there, with their copies."""
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


# -- frees -----------------------------------------------------------------------------------

Group = Sequence[Run | Send | Start]  # a run with what is sent after it, or one of the others


def insert_frees(
    groups: Sequence[Group], parts: Sequence[Part], allocation: RegisterAllocation
) -> tuple[tuple[Instruction, ...], tuple[tuple[int, ...], ...]]:
    """Free each register after its last use; gives back which inputs each part may overwrite.

    A part that runs once overwrites the buffers of state, and of sums over microbatches, that
    nothing reads after it, and these registers are not freed. Outputs of the step stay.
    """
    # The list is walked from its end: the first use that is met of a register is its last, as in
    # the liveness of straight-line code. `seen` are the registers of which it was met.
    #
    #     run 0: r4 = f(r0)   send r4   run 1: r5 = g(r4, r0)   free r0 r4   output r5
    #                                          last use of r0 and r4         in use to the end
    #
    # 1. Outputs of the step are in use to the end.
    backward: list[Instruction] = []
    donated: list[tuple[int, ...]] = [()] * len(parts)
    sums = [set[int]() for _ in allocation.register_counts]
    for own in allocation.parts:
        for slot in own.accumulators:
            sums[slot.submesh].update(slot.registers)
    seen: list[set[int]] = [set() for _ in allocation.register_counts]
    for fetch in allocation.fetches:
        seen[fetch.submesh].update(fetch.registers)
    met: set[int] = set()  # the parts that a run was met of
    for group in reversed(groups):
        # 2. The registers whose last use is in this group.
        last = {
            submesh: [r for r in dict.fromkeys(touched) if r not in seen[submesh]]
            for submesh, touched in _registers_of(group, parts, allocation, met).items()
        }
        met.update(step.part for step in group if isinstance(step, Run))
        # 3. Those that a part overwrites are gone with it: nothing frees them.
        for step in group:
            # Each microbatch reads its state again, so only parts that run once overwrite any.
            if isinstance(step, Run) and not parts[step.part].is_looped:
                part, slots = parts[step.part], allocation.parts[step.part]
                mine = part.submesh
                positions = (*_state(step, part, last), *_sums(step, part, slots, last, sums[mine]))
                donated[step.part] = tuple(sorted(positions))
                taken = {step.inputs[p] for p in positions}
                seen[mine] |= taken
                last[mine] = [r for r in last[mine] if r not in taken]
        # 4. The others are freed right behind the group.
        for submesh, registers in last.items():
            seen[submesh].update(registers)
            if registers:
                backward.append(Free(submesh, tuple(registers)))
        backward += reversed(group)
    return tuple(reversed(backward)), tuple(donated)


def _registers_of(
    group: Group, parts: Sequence[Part], allocation: RegisterAllocation, met: Collection[int]
) -> dict[int, list[int]]:
    """Submesh -> the registers that a group reads or writes there.

    Of a part that has been met, only those of the microbatch: it touches the others in every run.
    """
    found: dict[int, list[int]] = {}
    for step in group:
        if isinstance(step, Run):
            here = found.setdefault(parts[step.part].submesh, [])
            if step.part in met:
                rows = allocation.parts[step.part].rows
                here += (step.inputs[p] for p in rows.inputs.many)
                here += (step.outputs[p] for p in rows.outputs.many)
            else:
                here += (*step.inputs, *step.accumulators, *step.outputs)
        elif isinstance(step, Send):
            found.setdefault(step.source, []).extend(p.source for p in step.transfers)
            found.setdefault(step.target, []).extend(p.target for p in step.transfers)
        else:
            found.setdefault(step.submesh, []).extend(step.registers)
    return found


def _state(run: Run, part: Part, last: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """The positions of state that a part reads last, once."""
    for p, _ in _dying(run, part, last):
        if part.graph.inputs[p].role is Role.STATE:
            yield p


def _sums(
    run: Run, part: Part, slots: PartSlots, last: Mapping[int, Sequence[int]], sums: Collection[int]
) -> Iterator[int]:
    """The positions of sums that a part reads last, once, and that have room for an output.

    So gradients that wait for a norm over all stages stand where they were summed.
    """
    dying = list(_dying(run, part, last))
    outputs = slots.outputs if dying else ()
    room = Counter((slot.value.type_text, slot.sharding) for slot in outputs)
    for p, register in dying:
        summed = slots.inputs[p].value.type_text, slots.inputs[p].sharding
        if register in sums and room[summed] > 0:
            room[summed] -= 1
            yield p


def _dying(run: Run, part: Part, last: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Positions and registers that a part, which runs once, reads last and once."""
    dying, often = frozenset(last[part.submesh]), Counter(run.inputs)
    for p, register in enumerate(run.inputs):
        if register in dying and often[register] == 1:
            yield p, register
