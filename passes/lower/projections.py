"""Verification of a job: no process ever waits for one that waits for it.

Every process walks its part of the one list. Its host hands programs to the devices and goes on;
it stops only where too many are in flight. So an instruction is done after

    1. the hosts of all processes concerned have come to it,
    2. what it reads has been made,
    3. what is before it in the queue of each of its submeshes, in each process, is done;

and a host comes to an instruction after it has passed the one before, and where `limit` programs
are in flight on a submesh, after the oldest of them is done:

    process 0   run F0.0 --> send 1 --> run F0.1 ...      down: the host comes to it, then the
                   |            |                          devices do it
    process 1      .         send 1 --> run F1.0 ...       right: in the order of the walk

If every walk is in the order of the list, then all of these point from earlier to later
instructions (each read is of an earlier one), and nothing can wait in a circle. That is checked
here for the walks as they are, and so is the circle: on plain data, for any number of processes.
Processes that walk alike and have devices of the same submeshes count as one: a circle among the
many would be one among these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import JobError, bulleted
from autopar.ir.program import Free, Program, Send
from autopar.ir.projection import EDGE_BITS, LEG_BITS, Host, Walk

_SHOWN = 20
_REMEDY = (
    "Each process makes its list of the plan: start all of them with the same autopar, plan and "
    "devices. Where they have these, this is a fault of autopar: please report it."
)


@dataclass(frozen=True)
class Transports:
    """The facts about a transport that waiting depends on.

    One that `asks_all` has every process take part in the sends that leave one, in one order.
    `limit` programs may be in flight on a submesh; 0 is any number.
    """

    asks_all: bool = False
    limit: int = 0


def verify_projections(
    program: Program,
    submeshes: Sequence[frozenset[int]],
    walks: Sequence[Walk],
    transports: Transports = Transports(),
) -> None:
    """Raise JobError with a list of all faults, unless these walks always come to their end.

    `submeshes` are the processes that have devices of each, and there is a walk for each process.
    Laws: the processes concerned with an instruction walk it once, as the list has it, and nobody
    else does; each walks in the order of the list; numbers of sends fit into what is sent with
    them; and no process waits in a circle.
    """
    groups = _groups(submeshes, walks)
    circle = _Waiting(program, groups, transports).circle()
    faults = [circle] if circle else []
    faults += [*_places(program, submeshes, len(walks)), *_numbers(program)]
    for group in groups:
        host = Host(group.first, len(walks), tuple(submeshes))
        wanted = host.walk(program, transports.asks_all)
        if group.walk != wanted:
            faults += _walk_faults(program, group, [number for number, _ in wanted])
    if faults:
        shown = faults[:_SHOWN]
        if len(faults) > len(shown):
            shown.append(f"... and {len(faults) - len(shown)} more")
        headline = (
            f"{len(walks)} processes cannot run a program of {len(program.instructions)} "
            "instructions together:"
        )
        raise JobError(bulleted(headline, shown, _REMEDY))


@dataclass(frozen=True)
class _Group:
    """Processes that have devices of the same submeshes, and one walk."""

    processes: tuple[int, ...]
    owned: frozenset[int]
    walk: Walk

    @property
    def first(self) -> int:
        return self.processes[0]

    @cached_property
    def name(self) -> str:
        """The processes in words."""
        if len(self.processes) == 1:
            return f"process {self.first}"
        return f"process {self.first} (and {len(self.processes) - 1} that walk like it)"


def _groups(submeshes: Sequence[frozenset[int]], walks: Sequence[Walk]) -> list[_Group]:
    owned: list[set[int]] = [set() for _ in walks]
    for submesh, processes in enumerate(submeshes):
        for process in processes:
            if process < len(walks):
                owned[process].add(submesh)
    found: dict[tuple[int, frozenset[int]], list[int]] = {}
    for process, walk in enumerate(walks):
        found.setdefault((id(walk), frozenset(owned[process])), []).append(process)
    return [
        _Group(tuple(processes), own, walks[processes[0]]) for (_, own), processes in found.items()
    ]


# -- laws --------------------------------------------------------------------------------------


def _places(program: Program, submeshes: Sequence[frozenset[int]], count: int) -> Iterator[str]:
    if len(submeshes) != len(program.submeshes):
        yield f"{len(submeshes)} submeshes are on processes and the plan has " + str(
            len(program.submeshes)
        )
    for submesh, processes in enumerate(submeshes):
        strangers = sorted(p for p in processes if not 0 <= p < count)
        if not processes or strangers:
            where = f"on process {strangers[0]} of {count}" if strangers else "on no process"
            yield f"submesh {submesh} is {where}: plan for the devices that the job has"


def _numbers(program: Program) -> Iterator[str]:
    """Numbers that are too large for what is sent with each offer."""
    sends = [n for n, step in enumerate(program.instructions) if isinstance(step, Send)]
    if sends and sends[-1] >= 1 << EDGE_BITS:
        yield (
            f"instruction {sends[-1]} sends, and sends are numbered up to {(1 << EDGE_BITS) - 1}: "
            "plan fewer microbatches"
        )
    for submesh, own in enumerate(program.submeshes):
        if sends and own.mesh.device_count > 1 << LEG_BITS:
            yield (
                f"submesh {submesh} has {own.mesh.device_count} devices, and a send has at most "
                f"{1 << LEG_BITS} pairs of processes: plan more stages"
            )


def _walk_faults(program: Program, group: _Group, wanted: Sequence[int]) -> Iterator[str]:
    """The instructions that processes lack, have twice, or otherwise than the list has them.

    Of those out of order only the first is told.
    """
    listed, seen, last, is_turned = program.instructions, set[int](), -1, False
    own = set(wanted)

    def name(number: int) -> str:
        return f"instruction {number} ({program.text_of(listed[number])})"

    for number, step in group.walk:
        if not 0 <= number < len(listed):
            yield f"{group.name} walks instruction {number}, which there is not"
            continue
        if number not in own:
            yield f"{group.name} walks {name(number)}, in which it has no part"
        elif number in seen:
            yield f"{group.name} walks {name(number)} a second time"
        elif number < last and not is_turned:
            is_turned = True
            yield (
                f"{group.name} walks {name(number)} after instruction {last}; "
                "the list has it before"
            )
        if step is not listed[number] and step != listed[number]:
            yield f"{group.name} has {name(number)} as another: {program.text_of(step)}"
        seen.add(number)
        last = max(last, number)
    for number in wanted:
        if number not in seen:
            yield f"{group.name} leaves out {name(number)}, for which others would wait"


# -- the wait-for graph ------------------------------------------------------------------------


class _Waiting:
    """The wait-for graph of some walks: nodes that wait for others before they come about.

    Node n below the number of instructions is "instruction n is done"; those from there on are
    "the host of a group has waited, and comes to an instruction". Between two waits a host comes
    to all at once.
    """

    def __init__(self, program: Program, groups: Sequence[_Group], transports: Transports) -> None:
        self._program, self._groups = program, groups
        self._count = len(program.instructions)
        self._waits: list[list[int]] = [list(p) for p in program.producers]
        self._places: list[tuple[int, int]] = []  # of the other nodes: group and instruction
        self._queued: set[tuple[int, int]] = set()  # (instruction, the one before it in a queue)
        for index in range(len(groups)):
            self._add(index, transports)

    def circle(self) -> str:
        """A circle of nodes that wait for one another, in words; "" if there is none."""
        # Kahn's algorithm: take away what waits for nothing, until nothing is left, or a circle.
        left = [len(waits) for waits in self._waits]
        readers: list[list[int]] = [[] for _ in self._waits]
        for node, waits in enumerate(self._waits):
            for other in waits:
                readers[other].append(node)
        free = deque(node for node, count in enumerate(left) if not count)
        while free:
            for node in readers[free.popleft()]:
                left[node] -= 1
                if not left[node]:
                    free.append(node)
        stuck = next((node for node, count in enumerate(left) if count), None)
        if stuck is None:
            return ""
        # From any that is left, each waits for another that is left: follow them round.
        path: list[int] = []
        while stuck not in path:
            path.append(stuck)
            stuck = next(other for other in self._waits[stuck] if left[other])
        circle = [self._name(node) for node in path[path.index(stuck) :]]
        some = [*circle[:_SHOWN], *["..."] * (len(circle) > _SHOWN)]
        return f"these would wait for one another for ever: {', '.join(some)}"

    def _name(self, node: int) -> str:
        if node < self._count:
            return f"instruction {node}"
        group, number = self._places[node - self._count]
        return f"{self._groups[group].name} at instruction {number}"

    def _add(self, index: int, transports: Transports) -> None:
        """Add what a group's host and queues make the instructions wait for."""
        group, ends, limit = self._groups[index], self._program.ends, transports.limit
        queues: dict[int, list[int]] = {s: [] for s in group.owned}
        order: list[int] = []  # of sends, where all take part in each
        host: list[int] = []  # the node of the host's last wait
        blocked: list[int] = []  # what it waits for before it goes on
        for number, _ in group.walk:
            if not 0 <= number < self._count:
                continue
            # 1. The host comes to it, once its window has room.
            if blocked:
                self._waits.append([*host, *blocked])
                self._places.append((index, number))
                host, blocked = [len(self._waits) - 1], []
            self._waits[number] += host
            if isinstance(self._program.instructions[number], Free):
                continue
            # 2. It is done after what is before it in the queues of its submeshes.
            source, target = ends[number]
            for submesh in {source, target} & queues.keys():
                self._queue(queues[submesh], number)
                # 3. With `limit` in flight the host waits for the oldest.
                if 0 < limit < len(queues[submesh]):
                    blocked.append(queues[submesh][-1 - limit])
            if transports.asks_all and source != target:
                self._queue(order, number)

    def _queue(self, queue: list[int], number: int) -> None:
        """Let an instruction wait for the last one of a queue, and come after it."""
        if queue and queue[-1] != number and (number, queue[-1]) not in self._queued:
            self._queued.add((number, queue[-1]))
            self._waits[number].append(queue[-1])
        queue.append(number)
