"""A job in one process, by a seed: the executor's own code for each process, all else played.

Each process of the job is a thread that walks the actions that the executor bound for it. One of
them runs at a time, and at every turn a draw says what happens next: a process goes on, a program
of a submesh ends, something sent arrives, or gets lost and is sent again. Programs give tags of
what went into them in place of arrays. A seed is a run: the same draws, the same turns.

    process 0   act act .... wait for a token                 .... act
    process 1       act .......................... act act
    devices                  F0.0 ends             F0.0 arrives, F1.0 ends
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast, final
from unittest import mock

import numpy as np

from autopar.ir.program import Program, Run, Send, Start
from autopar.ir.projection import Host, paired
from autopar.runtime import actions, spanning
from autopar.runtime.actions import Action, Binding
from autopar.runtime.transport.abstract import AbstractTransport, Copier, Endpoint, Route

_AGAIN = 0.6  # the chance that who has the turn keeps it
_LOST = (0.0, 0.3, 0.95)  # chances that what is sent gets lost once more, one for each edge
_AWAY = 300  # the most draws until that is noticed
_CALLS = 3  # steps of a job, one after the other


class Fault(Exception):
    """The job did what no job may do."""


class Ended(BaseException):
    """The run is over, for a thread that still waits."""


class Tagged:
    """An array on a submesh, as one process has it: its tag, once it has been made."""

    def __init__(self, world: World, process: int, submesh: int, tag: Any = None) -> None:
        self.world, self.process, self.submesh, self.tag = world, process, submesh, tag
        self.is_consumed = False

        self.pieces: Sequence[Tagged] = ()  # from several processes, that it is put together of

    @property
    def is_ready(self) -> bool:
        if self.tag is None and self.pieces and all(p.is_ready for p in self.pieces):
            found = {p.tag for p in self.pieces}
            self.tag = found.pop() if len(found) == 1 else f"pieces of {found}"
        return self.tag is not None

    def block_until_ready(self) -> Tagged:
        self.world.turn(self.process, lambda: self.is_ready)
        return self

    def copied(self) -> Tagged:
        made = Tagged(self.world, self.process, self.submesh)
        self.world.queue(self.process, self.submesh, Queued("copy", [self], [made], _same))
        return made


def _same(tags: Sequence[Any]) -> Sequence[Any]:
    return tags


@dataclass
class Queued:
    """A program in the queue of a submesh, in one process."""

    key: Any
    given: Sequence[Tagged]
    made: Sequence[Tagged]
    tags: Callable[[Sequence[Any]], Sequence[Any]]
    consumed: Sequence[Tagged] = ()


@dataclass
class Parcel:
    """The arrays of a leg on their way, from when both ends know of it."""

    sender: int
    receiver: int
    given: Sequence[Tagged] | None = None
    made: Sequence[Tagged] | None = None
    sent_again: int = 0  # the number of the draw from which on it may arrive
    is_spoilt: bool = False  # consumed before it was taken


@dataclass(eq=False)
class Mesh:
    """The devices of a submesh, each with its process."""

    world: World
    process: int
    submesh: int
    owners: tuple[int, ...]

    @property
    def devices(self) -> Any:
        return np.array([SimpleNamespace(process_index=p) for p in self.owners], dtype=object)


class World:
    """All processes and devices of a job, and the draws."""

    def __init__(
        self, seed: int, count: int, owners: Sequence[tuple[int, ...]], dead: int | None
    ) -> None:
        self.rng, self.seed, self.count = random.Random(seed), seed, count
        self.owners = [sorted(set(own)) for own in owners]
        self.queues = {(p, s): deque[Queued]() for s, own in enumerate(self.owners) for p in own}
        self.parcels: dict[Any, Parcel] = {}
        self.puts: list[list[Any]] = [[] for _ in range(count)]
        self.wires: list[list[Any]] = [[] for _ in range(count)]  # its puts under way, in order
        self.turns: list[threading.Semaphore] = [threading.Semaphore(0) for _ in range(count)]
        self.over = threading.Semaphore(0)
        self.until: dict[int, Callable[[], bool]] = {p: _now for p in range(count)}
        self.faults: list[str] = []
        self.drawn, self.lost = 0, self.rng.choices(_LOST, k=7)
        self.dead, self.death = dead, self.rng.randrange(150)
        self.is_ended = False

    # -- turns -----------------------------------------------------------------------------

    def turn(self, process: int, until: Callable[[], bool] = lambda: True) -> None:
        """Let a draw say what happens, until it is this process that goes on."""
        if until() and not self._is_dead(process) and self.rng.random() < _AGAIN:
            return
        self.until[process] = until
        self.hand_on()
        self.turns[process].acquire()
        if self.is_ended:
            raise Ended

    def hand_on(self) -> None:
        """Draw until a process goes on, or nothing can happen any more."""
        while True:
            self.drawn += 1
            ready = [p for p, until in self.until.items() if not self._is_dead(p) and until()]
            events = [*self._programs(), *self._arrivals()]
            if not ready and not events:
                later = [p.sent_again for p in self.parcels.values() if p.sent_again > self.drawn]
                if later:
                    self.drawn = min(later)
                elif self.until and self._is_dead(self.dead):
                    self.dead = None  # nobody else can go on: see that it was for want of this one
                else:
                    self.over.release()
                    return
                continue
            n = self.rng.randrange(len(ready) + len(events))
            if n < len(ready):
                self.turns[ready[n]].release()
                return
            events[n - len(ready)]()

    def _is_dead(self, process: int | None) -> bool:
        return process is not None and process == self.dead and self.drawn > self.death

    # -- devices ---------------------------------------------------------------------------

    def queue(self, process: int, submesh: int, program: Queued) -> None:
        """Hand a program to the devices of a submesh."""
        if any(a.is_consumed for a in program.given):
            raise Fault(f"{program.key} is given an array that was consumed")
        self.queues[process, submesh].append(program)
        for array in program.consumed:
            array.is_consumed = True

    def _programs(self) -> Iterator[Callable[[], None]]:
        """The programs that may end: first in the queue in all processes, all operands made."""
        for submesh, own in enumerate(self.owners):
            queues = [self.queues[p, submesh] for p in own]
            if self._is_dead(self.dead) and self.dead in own:
                continue
            if all(q and all(a.is_ready for a in q[0].given) for q in queues):
                yield lambda submesh=submesh: self._end(submesh)  # type: ignore[misc]

    def _end(self, submesh: int) -> None:
        ran = [self.queues[p, submesh].popleft() for p in self.owners[submesh]]
        results = {(str(r.key), *r.tags([a.tag for a in r.given])) for r in ran}
        if len(results) > 1:
            self.faults.append(f"processes run different programs on mesh{submesh}: {results}")
        for program in ran:
            tags = program.tags([a.tag for a in program.given])
            for array, tag in zip(program.made, tags, strict=True):
                array.tag = tag
            for parcel in self.parcels.values():
                # Within a process the runtime keeps what is under way.
                leaves = parcel.sender != parcel.receiver
                if leaves and any(a in program.consumed for a in parcel.given or ()):
                    parcel.is_spoilt = True

    # -- wires -----------------------------------------------------------------------------

    def parcel(self, key: Any, sender: int, receiver: int) -> Parcel:
        return self.parcels.setdefault(key, Parcel(sender, receiver))

    def put(self, process: int, key: Any, is_end: bool) -> None:
        """Note a put, which must be of the same number in all processes."""
        self.puts[process].append(key)
        if is_end:
            self.wires[process].append(key)
        number = len(self.puts[process]) - 1
        known = {own[number] for own in self.puts if len(own) > number}
        if len(known) > 1:
            self.faults.append(f"put {number} is another in some processes: {known}")

    def _arrivals(self) -> Iterator[Callable[[], None]]:
        for key, parcel in self.parcels.items():
            if parcel.given is None or parcel.made is None or parcel.sent_again > self.drawn:
                continue
            if self._is_dead(parcel.sender):
                continue
            if all(a.is_ready for a in parcel.given) and self._is_first(key):
                yield lambda key=key: self._arrive(key)  # type: ignore[misc]

    def _is_first(self, key: Any) -> bool:
        """True if no earlier put is under way at either end; of pulls none waits for another."""
        return all(key == own[0] for own in self.wires if key in own)

    def _arrive(self, key: Any) -> None:
        if self.rng.random() < self.lost[key[0] % len(self.lost)]:
            self.parcels[key].sent_again = self.drawn + self.rng.randrange(_AWAY)
            return
        parcel = self.parcels.pop(key)
        for own in self.wires:
            if key in own:
                own.remove(key)
        for array, sent in zip(parcel.made or (), parcel.given or (), strict=True):
            array.tag = "consumed before it was taken" if parcel.is_spoilt else sent.tag


def _now() -> bool:
    return True


@final
class SimulatedTransport(AbstractTransport):
    """Transport over the wires of a world, which keep no order, or that of the puts."""

    name = "simulated"

    def __init__(self, world: World, process: int, asks_all: bool) -> None:
        self._world, self._process, self._asks_all = world, process, asks_all

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function of tagged arrays; layouts change before and after by the edge."""
        world, me, calls = self._world, self._process, itertools.count()
        ends = cast(Mesh, source.mesh), cast(Mesh, target.mesh)
        pairs = sorted(set(paired(ends[0].owners, ends[1].owners)))
        draws = random.Random(1000 * world.seed + edge)
        relays = [draws.random() < 0.5 for _ in ends]
        leaves, arrives = (me in mesh.owners for mesh in ends)

        def relay(which: int, arrays: Sequence[Tagged], call: int) -> Sequence[Tagged]:
            made = [Tagged(world, me, ends[which].submesh) for _ in arrays]
            token = Tagged(world, me, ends[which].submesh)
            key = f"layout of {edge}, call {call}"
            program = Queued(key, arrays, [*made, token], lambda tags: [*tags, "token"])
            world.queue(me, ends[which].submesh, program)
            (source, target)[which].admit(token)
            return made

        def copy(arrays: Sequence[Any]) -> Sequence[Any]:
            call = next(calls)
            if leaves and relays[0]:
                arrays = relay(0, arrays, call)
            arrived: list[list[Tagged]] = []
            for leg, (sender, receiver) in enumerate(pairs):
                key = (edge, leg, call)
                if self._asks_all and sender != receiver:
                    world.put(me, key, me in (sender, receiver))
                if me not in (sender, receiver):
                    continue
                parcel = world.parcel(key, sender, receiver)
                if me == sender:
                    parcel.given = arrays
                if me == receiver:
                    parcel.made = [Tagged(world, me, ends[1].submesh) for _ in routes]
                    arrived.append(list(parcel.made))
            if not arrives:
                return [None] * len(routes)
            whole = [Tagged(world, me, ends[1].submesh) for _ in routes]
            for array, *pieces in zip(whole, *arrived, strict=True):
                array.pieces = pieces
            return relay(1, whole, call) if relays[1] else whole

        return copy


# -- a job -------------------------------------------------------------------------------------


@dataclass
class Job:
    """A program on the processes of a job, and how it is run."""

    program: Program
    count: int
    owners: Sequence[tuple[int, ...]]
    asks_all: bool
    limit: int
    dead: int | None = None
    forgetful: int | None = None  # a process that leaves out its last send
    results: dict[tuple[int, int, int], Any] = field(default_factory=dict[Any, Any])

    def run(self, seed: int) -> float:
        """Run all its calls; raises Fault where it does what no job may do.

        The result is the last draw: that of a run which differs anywhere is another.
        """
        world = World(seed, self.count, self.owners, self.dead)
        with _played():
            bound = [self._bound(world, p) for p in range(self.count)]
            threads = [
                threading.Thread(target=self._process, args=(world, p, bound[p]), daemon=True)
                for p in range(self.count)
            ]
            for thread in threads:
                thread.start()
            world.hand_on()
            world.over.acquire()
            stuck, world.is_ended = sorted(world.until), True
            for semaphore in world.turns:
                semaphore.release()
            for thread in threads:
                thread.join()
        if stuck:
            world.faults.append(f"processes {stuck} wait for ever")
        wanted = reference(self.program)
        for (process, call, output), tag in self.results.items():
            if tag != wanted[call, output]:
                world.faults.append(f"output {output} of call {call} is wrong in process {process}")
        if world.faults:
            raise Fault(f"seed {seed}: {world.faults[0]}")
        return world.rng.random()

    def _host(self, process: int) -> Host:
        return Host(process, self.count, tuple(frozenset(own) for own in self.owners))

    def _bound(self, world: World, process: int) -> Sequence[Action]:
        """The actions of a process, as its executor would bind them."""
        program, host = self.program, self._host(process)
        meshes: Any = [Mesh(world, process, s, own) for s, own in enumerate(self.owners)]
        compiled = {n: _compiled(program, n, world, process) for n in range(len(program.parts))}
        types: Any = SimpleNamespace(
            routes={
                n: step.transfers
                for n, step in enumerate(program.instructions)
                if isinstance(step, Send)
            },
            starts={n: () for n, s in enumerate(program.instructions) if isinstance(s, Start)},
        )
        sources: Any = [SimpleNamespace(has_token=True)] * len(program.parts)
        transport = SimulatedTransport(world, process, self.asks_all)
        binding = Binding(program, host, compiled, sources, meshes, transport, self.limit)
        numbers = list(host.numbers(program, self.asks_all))
        if process == self.forgetful:
            numbers.remove(max(n for n in numbers if isinstance(program.instructions[n], Send)))
        return binding.actions(numbers, types)

    def _process(self, world: World, process: int, bound: Sequence[Action]) -> None:
        try:
            world.turns[process].acquire()
            if not world.is_ended:
                self._calls(world, process, bound)
                del world.until[process]
                world.hand_on()
        except Ended:
            return
        except Exception as error:
            world.faults.append(f"process {process} raises {error!r}")
            world.until.pop(process, None)
            world.hand_on()

    def _calls(self, world: World, process: int, bound: Sequence[Action]) -> None:
        program, host, state = self.program, self._host(process), dict[tuple[int, int], Tagged]()
        fetched: list[tuple[int, int, Tagged]] = []
        for call in range(_CALLS):
            registers: list[list[Any]] = [[None] * n for n in program.register_counts]
            for feed in program.feeds:
                if not host.owns(feed.submesh):
                    continue
                for i, register in enumerate(feed.registers):
                    fresh = Tagged(world, process, feed.submesh, _argument(feed.input, call, i))
                    held = state.get((feed.submesh, feed.input), fresh)
                    registers[feed.submesh][register] = held
            for act in bound:
                act(registers)
                world.turn(process)
            for fetch in program.fetches:
                if host.owns(fetch.submesh):
                    array = registers[fetch.submesh][fetch.registers[0]]
                    state[fetch.submesh, fetch.output] = array
                    fetched.append((call, fetch.output, array))
        for call, output, array in fetched:
            self.results[process, call, output] = array.block_until_ready().tag


@contextmanager
def _played() -> Generator[None]:
    """What would compile gives tags instead."""

    def starter(start: Start, kinds: Any, mesh: Mesh) -> Callable[[], Sequence[Any]]:
        del kinds
        return lambda: [
            Tagged(mesh.world, mesh.process, mesh.submesh, "zero") for _ in start.registers
        ]

    with (
        mock.patch.object(actions, "_starter", starter),
        mock.patch.object(spanning, "_copied", Tagged.copied),
    ):
        yield


def _compiled(program: Program, number: int, world: World, process: int) -> Callable[..., Any]:
    """A part's program: its results are tagged with what it was given."""
    part = program.parts[number]
    runs = (s for s in program.instructions if isinstance(s, Run) and s.part == number)
    run = next(runs)
    count, sums = len(run.outputs) + len(run.accumulators), len(run.inputs)

    def call(*arrays: Tagged) -> Sequence[Tagged]:
        made = [Tagged(world, process, part.part.submesh) for _ in range(count + 1)]
        consumed = [arrays[i] for i in part.donated] + list(arrays[sums:])
        queued = Queued(
            part.part.name, arrays, made, lambda tags: [*made_of(number, count, tags), "token"],
            consumed,
        )  # fmt: skip
        world.queue(process, part.part.submesh, queued)
        return made

    return call


def made_of(part: int, count: int, tags: Sequence[Any]) -> list[Any]:
    """The tags of a part's results."""
    return [hash((part, i, *tags)) for i in range(count)]


def _argument(number: int, call: int, i: int) -> Any:
    return hash((number, call, i))


def reference(program: Program) -> dict[tuple[int, int], Any]:
    """The tag of each output of each call, by the list alone, one instruction after the other."""
    found: dict[tuple[int, int], Any] = {}
    for call in range(_CALLS):
        held: dict[tuple[int, int], Any] = {}
        for feed in program.feeds:
            for i, register in enumerate(feed.registers):
                fresh = _argument(feed.input, call, i)
                held[feed.submesh, register] = found.get((call - 1, feed.input), fresh)
        for step in program.instructions:
            if isinstance(step, Run):
                m, writes = program.submesh_of(step), (*step.outputs, *step.accumulators)
                tags = [held[m, r] for r in (*step.inputs, *step.accumulators)]
                made = made_of(step.part, len(writes), tags)
                held.update(zip(((m, r) for r in writes), made, strict=True))
            elif isinstance(step, Send):
                for t in step.transfers:
                    held[step.target, t.target] = held[step.source, t.source]
            elif isinstance(step, Start):
                held.update(((step.submesh, r), "zero") for r in step.registers)
        found.update(((call, f.output), held[f.submesh, f.registers[0]]) for f in program.fetches)
    return found
