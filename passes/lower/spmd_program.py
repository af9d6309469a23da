"""Makes one SPMD program of all submeshes: a single jit in which stages take turns by ticks.

1. Slots. Registers of a submesh are grouped: one for each microbatch, or one for the step.
2. Ticks. In every tick each submesh runs the next forward part whose inputs have arrived, then the
   next backward part. What is sent arrives before the next tick. So a tick takes as long as one
   forward and one backward, and there are m + 2(p - 1) of them, half of which at either end are
   only one of the two: together as long as 1F1B. Where all forwards come first they do here, too.
3. Turns. A last stage runs its backward part right after its forward part, so what lies between
   them needs no cell.
4. Cells. Slots of one local shape and dtype that are used alike share cells, in the order in which
   parts read and write them: of equal stages equal values meet in one cell. New state is put
   together as the old was. A ring is as deep as the number of microbatches between the oldest and
   the newest that some submesh still needs.
5. Waves. What runs once, before and after a loop, runs in as few rounds as its inputs allow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.reshard import Resharder
from autopar.errors import LoweringError
from autopar.ir.host_calls import HOST_CALLS
from autopar.ir.listing import Move
from autopar.ir.program import ONCE, Instruction, PartKind, Program, Run, Send, Start, Transfer
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.spmd_program import (
    NONE,
    Cell,
    Held,
    Lane,
    Loop,
    Shift,
    Source,
    SpmdPart,
    SpmdProgram,
    Turn,
    Wave,
)
from autopar.ir.values import Value

_FORWARD, _BACKWARD = 0, 1  # the turns of a tick
_ARRIVAL = 2  # when what was sent in a tick is there: after both
_STEPS = 3  # of a tick
_GIVEN = ("given", "state", "rows")  # arguments of the step
_TURN = {PartKind.FORWARD: _FORWARD, PartKind.BACKWARD: _BACKWARD}


def lower_spmd(program: Program, resharder: Resharder) -> SpmdProgram:
    """The program as one that all submeshes run together; `resharder` is of any of them.

    Raises LoweringError, with the reason, where its stages are not of one shape.
    """
    _check_shape(program)
    return _Lowering(program, resharder).lower()


def _check_shape(program: Program) -> None:
    """Raise LoweringError unless submeshes are alike, each with one stage of one F and one B."""
    meshes = [s.mesh for s in program.submeshes]
    for number, mesh in enumerate(meshes):
        if mesh != meshes[0]:
            raise LoweringError(
                f"submesh 0 is ({meshes[0]}) and submesh {number} is ({mesh}): stages of one "
                "program run on equal submeshes"
            )
    seen = Counter[tuple[int, PartKind, int]]()
    for given in program.parts:
        part = given.part
        if part.is_looped and part.kind not in _TURN:
            raise LoweringError(
                f"{part.name} is a backward pass in two halves, as zero-bubble schedules have "
                "them: a tick has one forward and one backward"
            )
        calls = [op for op in part.graph.walk() if op.kind in HOST_CALLS]
        if calls:
            raise LoweringError(
                f"{part.name} calls Python at {calls[0].origin.line or calls[0].origin.module}: "
                "in one program of all stages a call has no place of its own"
            )
        if part.is_looped:
            seen[part.loop, part.kind, part.submesh] += 1
    for (_, _, submesh), count in seen.items():
        if count > 1:
            raise LoweringError(
                f"submesh {submesh} has {count} stages: one program has one on each"
            )


@dataclass
class _Slot:
    """The registers of one value on a submesh, from `first` on, and who writes and reads it."""

    submesh: int
    first: int
    is_looped: bool
    kind: str  # how it comes to be: given, state, rows, index, made, sum, received, ...
    writer: tuple[int, int] | None = None  # part and output
    source: _Slot | None = None  # what a received one is a copy of
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    combiner: str = ""
    move: Move | None = None  # on the way from its source
    readers: list[int] = field(default_factory=list[int])
    is_fetched: bool = False
    returns: _Slot | None = None  # the state that an output becomes at the next step
    is_returned: bool = False  # state that an output becomes
    cell: int = NONE

    @property
    def key(self) -> tuple[int, int]:
        """Its submesh and first register."""
        return self.submesh, self.first


class _Lowering:
    """The steps of `lower_spmd`, over one program."""

    def __init__(self, program: Program, resharder: Resharder) -> None:
        self.program, self.resharder = program, resharder
        self.submeshes = len(program.submeshes)
        self.slots: dict[tuple[int, int], _Slot] = {}
        self.reads: list[list[_Slot]] = [[] for _ in program.parts]
        self.sums: list[list[_Slot]] = [[] for _ in program.parts]
        self.writes: list[list[_Slot]] = [[] for _ in program.parts]
        self.copies: dict[tuple[int, int], list[_Slot]] = defaultdict(list)
        self._of_microbatch: dict[tuple[int, int], _Slot] = {}

    def lower(self) -> SpmdProgram:
        """The result of all five steps."""
        self._find_slots()
        loops = {number: self._loop(number) for number in self._loop_numbers}
        self._assign_cells(loops)
        parts = tuple(self._part(k, loops) for k in range(len(self.program.parts)))
        return SpmdProgram(
            self.program,
            tuple(self._cells),
            parts,
            tuple(self._segments(loops)),
            tuple(self._held(lambda s: s.kind in _GIVEN)),
            tuple(self._held(lambda s: s.is_fetched and s.kind not in _GIVEN)),
        )

    # -- 1. slots --------------------------------------------------------------------------

    def _find_slots(self) -> None:
        program = self.program
        for feed in program.feeds:
            looped = feed.rows is not None or feed.is_index
            kind = "index" if feed.is_index else "rows" if feed.rows is not None else "given"
            self._add(_Slot(feed.submesh, feed.registers[0], looped, kind), feed.registers)
        for step in program.instructions:
            if isinstance(step, Run):
                self._see_run(step)
            elif isinstance(step, Send):
                self._see_send(step)
            elif isinstance(step, Start):
                for r, a, v in zip(step.registers, step.accumulators, step.values, strict=True):
                    dtype = a.dtype or v.dtype
                    slot = _Slot(step.submesh, r, False, "sum", None, None, None, dtype, a.combiner)
                    self._add(slot, (r,))
        for fetch in program.fetches:
            self._slot(
                fetch.submesh, fetch.registers[0], 0 if fetch.rows else ONCE
            ).is_fetched = True
        for k, given in enumerate(program.parts):
            for position in given.donated:
                slot = self.reads[k][position]
                slot.kind = "state" if slot.kind == "given" else slot.kind
            self._set_types(k)
            self._pair_state(k)

    def _add(self, slot: _Slot, registers: Sequence[int]) -> _Slot:
        if slot.key not in self.slots:
            self.slots[slot.key] = slot
        slot = self.slots[slot.key]
        for register in registers:
            self._of_microbatch[slot.submesh, register] = slot
        return slot

    def _slot(self, submesh: int, register: int, microbatch: int) -> _Slot:
        """The slot of a register, as who runs on a microbatch sees it."""
        slot = self._of_microbatch[submesh, register]
        if slot.is_looped and (microbatch == ONCE or register - microbatch != slot.first):
            raise LoweringError(
                f"what runs once reads r{register} of mesh{submesh}, a value of one microbatch"
            )
        return slot

    def _see_run(self, run: Run) -> None:
        k, i = run.part, max(run.microbatch, 0)
        submesh, looped = self.program.submesh_of(run), run.microbatch != ONCE
        if i == 0:
            self.reads[k] = [self._slot(submesh, r, run.microbatch) for r in run.inputs]
            self.sums[k] = [self._slot(submesh, r, ONCE) for r in run.accumulators]
            for slot in {s.key: s for s in (*self.reads[k], *self.sums[k])}.values():
                slot.readers.append(k)
        for o, register in enumerate(run.outputs):
            slot = self._add(_Slot(submesh, register - i, looped, "made", (k, o)), (register,))
            if i == 0:
                self.writes[k].append(slot)

    def _see_send(self, send: Send) -> None:
        i = max(send.microbatch, 0)
        for transfer in send.transfers:
            source = self._slot(send.source, transfer.source, send.microbatch)
            kind = f"received {send.target - send.source}"
            looped = send.microbatch != ONCE
            slot = _Slot(send.target, transfer.target - i, looped, kind, None, source)
            slot.shape = self._local(transfer.value, transfer.after)
            slot.dtype = transfer.value.dtype
            if source.shape is None:
                source.shape = self._local(transfer.value, transfer.before)
                source.dtype = transfer.value.dtype
            slot.move = self._move(transfer)
            if slot.key not in self.slots:
                self.copies[source.key].append(slot)
            self._add(slot, (transfer.target,))

    def _move(self, transfer: Transfer) -> Move | None:
        """The move that gives a sent value the sharding of its receiver, before it is sent."""
        value, before, after = transfer.value, transfer.before, transfer.after
        if before == after:
            return None
        if before.partial or after.partial:
            raise LoweringError(
                f"{value.type_text} {value.name} is sent as a partial sum, from {before} to {after}"
            )
        steps = self.resharder.route(value, before, after).steps
        plain = Value("", value.shape, value.dtype)
        return Move(plain, "sent", "received", before, after, steps)

    def _set_types(self, k: int) -> None:
        """The local shapes and dtypes of what a part reads and writes."""
        given = self.program.parts[k]
        graph, listing = given.part.graph, given.listing
        for slot, argument, sharding in zip(
            self.reads[k], graph.inputs, listing.input_shardings, strict=True
        ):
            slot.shape = self._local(argument.value, sharding)
            slot.dtype = slot.dtype or argument.value.dtype
        summed = {a.value for a in given.part.accumulators}
        sums, plain = list(self.sums[k]), list(self.writes[k])
        for operand, sharding in zip(graph.outputs, listing.output_shardings, strict=True):
            slot = sums.pop(0) if operand in summed else plain.pop(0)
            slot.shape = self._local(graph.value(operand), sharding)
            slot.dtype = slot.dtype or graph.value(operand).dtype

    def _pair_state(self, k: int) -> None:
        """Pair what a part makes of its submesh's state with that state."""
        part = self.program.parts[k].part
        summed, returns = {a.value for a in part.accumulators}, dict(part.graph.donated)
        plain = [o for o, operand in enumerate(part.graph.outputs) if operand not in summed]
        for o, slot in zip(plain, self.writes[k], strict=True):
            before = self.reads[k][returns[o]] if o in returns else None
            if before is not None and before.kind == "state":
                slot.returns, before.is_returned = before, True

    def _local(self, value: Value, sharding: Sharding) -> tuple[int, ...]:
        """The shape of one device's piece; a partial sum lies as a stack of one."""
        mesh: MeshShape = self.program.submeshes[0].mesh
        piece = sharding.shard_shape(value.shape, mesh)
        return (1, *piece) if sharding.partial else piece

    # -- 2. ticks and 3. turns -------------------------------------------------------------

    @cached_property
    def _loop_numbers(self) -> tuple[int, ...]:
        return tuple(sorted({p.part.loop for p in self.program.parts if p.part.is_looped}))

    def _loop(self, number: int) -> _Ticks:
        own: list[dict[int, int]] = [{}, {}]  # turn -> submesh -> part
        order: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
        flushed = True
        seen_backward: set[int] = set()
        for step in self.program.instructions:
            if isinstance(step, Run) and step.microbatch != ONCE:
                part = self.program.parts[step.part].part
                if part.loop == number:
                    turn = _TURN[part.kind]
                    own[turn][part.submesh] = step.part
                    order[turn][part.submesh].append(step.microbatch)
                    seen_backward |= {part.submesh} if turn == _BACKWARD else set()
                    flushed &= turn == _BACKWARD or part.submesh not in seen_backward
        return _Ticks(self, own, order, flushed and self.program.microbatches > 1)

    def senders(self, k: int) -> Iterator[int]:
        """The parts of other submeshes that a part waits for in its loop."""
        loop = self.program.parts[k].part.loop
        for slot in self.reads[k]:
            if slot.is_looped and slot.source is not None and slot.source.writer is not None:
                sender = slot.source.writer[0]
                if self.program.parts[sender].part.loop == loop:
                    yield sender

    # -- 4. cells --------------------------------------------------------------------------

    def _assign_cells(self, loops: dict[int, _Ticks]) -> None:
        self._cells: list[Cell] = []
        known: dict[object, int] = {}
        times = _Times(self, loops)
        depths: dict[int, int] = {}
        for submesh in range(self.submeshes):
            met: Counter[object] = Counter()
            for slot in self._in_order(submesh):
                if not self._needs_cell(slot, loops):
                    continue
                looped = slot.is_looped
                key = self._use(slot), looped, slot.combiner, slot.shape, slot.dtype
                place = (key, met[key])
                met[key] += 1
                if place not in known:
                    known[place] = len(self._cells)
                    assert slot.shape is not None
                    self._cells.append(Cell(slot.shape, slot.dtype, 0, slot.combiner))
                slot.cell = known[place]
                if looped:
                    whole = slot.kind == "rows" or slot.is_fetched
                    depth = self.program.microbatches if whole else times.window(slot)
                    depths[slot.cell] = max(depths.get(slot.cell, 1), depth)
        for number, depth in depths.items():
            cell = self._cells[number]
            self._cells[number] = Cell(cell.shape, cell.dtype, depth, cell.combiner)

    def _use(self, slot: _Slot) -> tuple[object, ...]:
        """The use of a slot's cell: new state shares one with what the old shares its own with.

        So what a step gives back is a cell of the next step as it is.
        """
        if slot.returns is not None and slot.is_fetched:
            return "returned", slot.returns.cell
        return slot.kind, slot.is_fetched, slot.is_returned

    def _in_order(self, submesh: int) -> Iterator[_Slot]:
        """The slots of a submesh as its parts read and write them, then what is left."""
        seen: set[tuple[int, int]] = set()
        for k, given in enumerate(self.program.parts):
            if given.part.submesh == submesh:
                for slot in (*self.reads[k], *self.sums[k], *self.writes[k]):
                    if slot.key not in seen:
                        seen.add(slot.key)
                        yield slot
        for slot in self.slots.values():
            if slot.submesh == submesh and slot.key not in seen and slot.shape is not None:
                yield slot

    def _needs_cell(self, slot: _Slot, loops: dict[int, _Ticks]) -> bool:
        """False of what is read in the turn that makes it alone, or that nobody reads."""
        if slot.kind == "index":
            return False
        if slot.kind != "made" or not slot.is_looped or slot.is_fetched:
            return True
        assert slot.writer is not None
        loop = loops[self.program.parts[slot.writer[0]].part.loop]
        return any(not loop.is_chained(slot.writer[0], k) for k in slot.readers)

    def _part(self, k: int, loops: dict[int, _Ticks]) -> SpmdPart:
        loop = loops.get(self.program.parts[k].part.loop)

        def source(slot: _Slot) -> Source:
            # What is made in the same turn is in no cell yet.
            if slot.writer is not None and loop and loop.is_chained(slot.writer[0], k):
                return Source(part=slot.writer[0], output=slot.writer[1])
            return Source(slot.cell)

        return SpmdPart(
            tuple(map(source, self.reads[k])),
            tuple(s.cell for s in self.sums[k]),
            tuple(s.cell for s in self.writes[k]),
        )

    def _held(self, wanted: Callable[[_Slot], bool]) -> Iterator[Held]:
        registers: dict[int, list[int]] = {}
        consumed: set[int] = set()
        for slot in self.slots.values():
            if slot.cell != NONE and wanted(slot):
                row = registers.setdefault(slot.cell, [NONE] * self.submeshes)
                row[slot.submesh] = slot.first
                consumed |= {slot.cell} if slot.kind == "state" else set()
        for cell, row in sorted(registers.items()):
            yield Held(cell, tuple(row), cell in consumed)

    # -- 5. waves --------------------------------------------------------------------------

    def _segments(self, loops: dict[int, _Ticks]) -> Iterator[Wave | Loop]:
        once: list[Run | Send] = []
        done: set[int] = set()
        for step in self.program.instructions:
            number = self._loop_of(step)
            if number == NONE and isinstance(step, Run | Send):
                once.append(step)
            elif number >= 0 and number not in done:
                yield from self._waves(once)
                once = []
                done.add(number)
                yield loops[number].loop()
        yield from self._waves(once)

    def _loop_of(self, step: Instruction) -> int:
        """The loop that an instruction is in; NONE of what runs once."""
        if isinstance(step, Run) and step.microbatch != ONCE:
            return self.program.parts[step.part].part.loop
        return NONE

    def _waves(self, steps: Sequence[Run | Send]) -> Iterator[Wave]:
        there: dict[tuple[int, int], int] = defaultdict(int)  # slot -> the wave that can read it
        free = [0] * self.submeshes
        parts: dict[int, list[int]] = {}
        shifts: dict[int, list[tuple[_Slot, _Slot]]] = defaultdict(list)
        sent: set[tuple[tuple[int, int], tuple[int, int]]] = set()
        for step in steps:
            if isinstance(step, Run):
                k, submesh = step.part, self.program.submesh_of(step)
                wave = max([free[submesh], *(there[s.key] for s in self.reads[k])])
                free[submesh] = wave + 1
                parts.setdefault(wave, [NONE] * self.submeshes)[submesh] = k
                there.update((s.key, wave + 1) for s in self.writes[k])
            elif step.microbatch == ONCE:
                for t in step.transfers:
                    source = self._slot(step.source, t.source, ONCE)
                    target = self._slot(step.target, t.target, ONCE)
                    if (source.key, target.key) not in sent:
                        sent.add((source.key, target.key))
                        there[target.key] = there[source.key]
                        shifts[there[source.key]].append((source, target))
        for wave in range(1 + max([*parts, *shifts], default=NONE)):
            none = [NONE] * self.submeshes
            yield Wave(tuple(_joined(shifts[wave])), tuple(parts.get(wave, none)))


def _joined(moved: Sequence[tuple[_Slot, _Slot]]) -> Iterator[Shift]:
    """The moves between cells as permutations: of each no submesh sends or receives twice."""
    found: dict[tuple[int, int, Move | None], list[list[tuple[int, int]]]] = {}
    for source, target in moved:
        pair = source.submesh, target.submesh
        groups = found.setdefault((source.cell, target.cell, target.move), [])
        for group in groups:
            if all(pair[0] != a and pair[1] != b for a, b in group):
                group.append(pair)
                break
        else:
            groups.append([pair])
    for (source_cell, target_cell, move), groups in found.items():
        for group in groups:
            yield Shift(source_cell, target_cell, tuple(sorted(group)), move)


class _Ticks:
    """The ticks of one loop: for each turn and tick the microbatch that every submesh runs."""

    def __init__(
        self,
        lowering: _Lowering,
        own: list[dict[int, int]],
        order: list[dict[int, list[int]]],
        flushed: bool,
    ) -> None:
        self._lowering = lowering
        self._own = own
        self.tables = self._placed(order, flushed)
        # A part that sends nothing runs right before the backward that reads what it leaves.
        self._chained = {
            submesh
            for submesh, k in own[_FORWARD].items()
            if submesh in own[_BACKWARD]
            and not any(lowering.copies[s.key] for s in lowering.writes[k] if s.is_looped)
            and all(f[submesh] == b[submesh] for f, b in zip(*self.tables, strict=True))
        }

    def _placed(
        self, order: list[dict[int, list[int]]], flushed: bool
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The tables of both turns: every part as soon as all that it reads is there."""
        lowering, count = self._lowering, self._lowering.submeshes
        total = sum(len(row) for turn in order for row in turn.values())
        ran: dict[tuple[int, int], int] = {}  # part and microbatch -> tick
        tables: tuple[list[list[int]], list[list[int]]] = ([], [])
        done = [[0] * count, [0] * count]
        tick = 0
        while len(ran) < total:
            before = len(ran)
            for turn in (_FORWARD, _BACKWARD):
                row = [NONE] * count
                for submesh, k in self._own[turn].items():
                    listed = order[turn][submesh]
                    at = done[turn][submesh]
                    if at == len(listed):
                        continue
                    i = listed[at]
                    forward = self._own[_FORWARD].get(submesh)
                    ready = all(ran.get((j, i), tick) < tick for j in lowering.senders(k))
                    if turn == _BACKWARD and forward is not None:
                        ready &= (forward, i) in ran
                        whole = done[_FORWARD][submesh] == len(order[_FORWARD][submesh])
                        ready &= whole or not flushed
                    if ready:
                        row[submesh] = i
                        ran[k, i] = tick
                        done[turn][submesh] += 1
                tables[turn].append(row)
            if len(ran) == before:
                raise LoweringError("its parts wait for one another in a circle within a tick")
            tick += 1
        return tables

    def is_chained(self, writer: int, reader: int) -> bool:
        """True if a part runs right after another, in the same turn of the same tick."""
        submesh = self._lowering.program.parts[writer].part.submesh
        pair = self._own[_FORWARD].get(submesh), self._own[_BACKWARD].get(submesh)
        return submesh in self._chained and (writer, reader) == pair

    def turn_of(self, k: int) -> int:
        """The turn in which a part runs."""
        part = self._lowering.program.parts[k].part
        return _BACKWARD if part.submesh in self._chained else _TURN[part.kind]

    def ran_at(self, k: int, microbatch: int) -> int:
        """The time at which a part runs, in steps of ticks."""
        turn, submesh = self.turn_of(k), self._lowering.program.parts[k].part.submesh
        tick = next(t for t, row in enumerate(self.tables[turn]) if row[submesh] == microbatch)
        return _STEPS * tick + turn

    def loop(self) -> Loop:
        """The loop, once all slots have cells."""
        lowering = self._lowering
        sums = {s.cell for turn in self._own for k in turn.values() for s in lowering.sums[k]}
        turns: list[Turn] = []
        for turn in (_FORWARD, _BACKWARD):
            parts: list[tuple[int, ...]] = []
            for submesh in range(lowering.submeshes):
                listed = [self._own[t][submesh] for t in (0, 1) if submesh in self._own[t]]
                parts.append(tuple(k for k in listed if self.turn_of(k) == turn))
            ticks = tuple(
                tuple(i if parts[s] else NONE for s, i in enumerate(row))
                for row in self.tables[turn]
            )
            running = [k for own in parts for k in own]
            turns.append(Turn(tuple(parts), ticks, tuple(self._lanes(running))))
        return Loop(tuple(sorted(sums)), tuple(turns))

    def _lanes(self, parts: Sequence[int]) -> Iterator[Lane]:
        """The lanes of what parts send, by the cell that it becomes: in none anyone sends twice."""
        lowering = self._lowering
        found: dict[tuple[int, Move | None], list[list[tuple[int, int, int, int]]]] = {}
        for k in parts:
            for o, slot in enumerate(lowering.writes[k]):
                for copy in lowering.copies[slot.key] if slot.is_looped else ():
                    sender = slot.submesh, copy.submesh, k, o
                    groups = found.setdefault((copy.cell, copy.move), [])
                    for group in groups:
                        if all(sender[0] != g[0] and sender[1] != g[1] for g in group):
                            group.append(sender)
                            break
                    else:
                        groups.append([sender])
        for (cell, move), groups in sorted(found.items(), key=lambda entry: entry[0][0]):
            yield from (Lane(cell, tuple(sorted(group)), move) for group in groups)


@dataclass(frozen=True)
class _Times:
    """The times at which values of microbatches come and go."""

    lowering: _Lowering
    loops: dict[int, _Ticks]

    def window(self, slot: _Slot) -> int:
        """Microbatches from the oldest to the newest that a slot holds at one time, at most.

        What a later loop reads is held for all of them.
        """
        if len({self._loop_of(k) for k in (self._writer(slot), *slot.readers)}) > 1:
            return self.lowering.program.microbatches
        spans = [self._span(slot, i) for i in range(self.lowering.program.microbatches)]
        most = 1
        for start, _ in spans:
            held = [i for i, (a, b) in enumerate(spans) if a <= start <= b]
            most = max(most, max(held) - min(held) + 1)
        return most

    def _span(self, slot: _Slot, microbatch: int) -> tuple[int, int]:
        """The times at which a microbatch's value is written, and is read last."""
        writer = self._writer(slot)
        start = self.loops[self._loop_of(writer)].ran_at(writer, microbatch)
        if slot.source is not None:
            start = start - start % _STEPS + _ARRIVAL
        reads = [self.loops[self._loop_of(k)].ran_at(k, microbatch) for k in slot.readers]
        return start, max(reads, default=start)

    def _writer(self, slot: _Slot) -> int:
        writer = slot.source.writer if slot.source is not None else slot.writer
        assert writer is not None
        return writer[0]

    def _loop_of(self, k: int) -> int:
        return self.lowering.program.parts[k].part.loop
