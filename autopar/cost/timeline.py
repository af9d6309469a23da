"""The timeline that XLA's latency-hiding scheduler dumps: when each instruction should run.

It holds the module and, of each computation with an async collective, when its instructions start
and end. A loop takes no time in the computation around it, so its runs are added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.compiled import Span

# The dump is a text proto of megabytes whose nesting is told by its indents, two spaces each.
_MODULE = re.compile(
    r"^(?:  entry_computation_name: \"(?P<entry>[^\"]*)\""
    r"|(?P<computation>  computations \{)"
    r"|    name: \"(?P<computation_name>[^\"]*)\""
    r"|    id: (?P<computation_id>\d+)"
    r"|(?P<instruction>    instructions \{)"
    r"|      name: \"(?P<name>[^\"]*)\""
    r"|      opcode: \"(?P<opcode>[^\"]*)\""
    r"|      id: (?P<id>\d+)"
    r"|        dimensions: (?P<dimension>\d+)"
    r"|      called_computation_ids: (?P<called>\d+)"
    r"|      comparison_direction: \"(?P<direction>\w+)\""
    r"|      backend_config: \".*known_trip_count\W+n\W+(?P<trips>\d+).*"
    r"|        s(?:32|64)s: (?P<constant>-?\d+))$",
    re.MULTILINE,
)
_SCHEDULES = re.compile(
    r"^(?:(?P<schedule>computation_schedules \{)"
    r"|  computation_id: (?P<computation>\d+)"
    r"|    id: (?P<id>\d+)"
    r"|    start_timestamp_cycles: (?P<start>\S+)"
    r"|    end_timestamp_cycles: (?P<end>\S+)"
    r"|  cycles_per_microsecond: (?P<rate>\S+))$",
    re.MULTILINE,
)
# What is no work on a device: names for values, and control flow, whose bodies are looked at.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
     "call", "async-start", "async-update", "async-done", "partition-id", "replica-id",
     "after-all", "opt-barrier")
)  # fmt: skip


@dataclass(frozen=True)
class CompilerTimeline:
    """The makespan of a step and what of it waits for collectives, in seconds.

    Both leave out the computations of `untimed`: they hold work, but no async collective, for
    which they were not scheduled. `spans` come computation by computation, the entry's first.
    """

    seconds: float
    exposed_seconds: float
    spans: tuple[Span, ...] = ()
    untimed: tuple[str, ...] = ()


def read_timeline(schedule_text: str) -> CompilerTimeline | None:
    """The step's timeline of a `*.schedule.txt` dump.

    None where it holds none, or only round numbers that stand in for times: XLA models those of
    Hopper and B200, and of TPUs, and takes a thousand units for each op on any other chip.
    """
    at = schedule_text.find("\ncomputation_schedules {") + 1
    if not at:
        return None
    module = _read_module(schedule_text[:at])
    schedules = {s.computation: s for s in _read_schedules(schedule_text[at:])}
    if all(s.is_made_up for s in schedules.values()):
        return None
    walk = _Walk(module, schedules)
    seconds, exposed = walk.through(module.entry, 1)
    return CompilerTimeline(seconds, exposed, tuple(walk.spans), tuple(walk.untimed))


# -- what the dump holds ------------------------------------------------------------------------


@dataclass
class _Instruction:
    name: str = ""
    opcode: str = ""
    dimensions: int = 0
    called: list[str] = field(default_factory=list[str])
    direction: str = ""
    trips: int = 0
    constant: int | None = None

    @property
    def is_work(self) -> bool:
        """Whether a device spends time on it worth telling: more than a scalar comes out."""
        return self.opcode not in _FREE and self.dimensions > 0


@dataclass
class _Computation:
    name: str = ""
    instructions: list[_Instruction] = field(default_factory=list[_Instruction])


@dataclass(frozen=True)
class _Module:
    entry: str
    computations: Mapping[str, _Computation]
    instructions: Mapping[str, _Instruction]


@dataclass
class _Schedule:
    """When the instructions of one computation run, in cycles."""

    computation: str = ""
    rows: list[list[float | str]] = field(default_factory=list[list[float | str]])
    rate: float = 1.0

    @property
    def end(self) -> float:
        """When the last instruction ends.

        The dump's own total_cycles is more: it adds up the whole latency of every collective, also
        of those that run beside work.
        """
        return max((end for _, _, end in self.times()), default=0.0)

    @property
    def busy(self) -> float:
        """How long instructions run; collectives run between those that start and end them."""
        return sum(end - start for _, start, end in self.times())

    @property
    def is_made_up(self) -> bool:
        """Whether every time is a whole number, as no model's are."""
        return all(start == int(start) and end == int(end) for _, start, end in self.times())

    def times(self) -> Iterator[tuple[str, float, float]]:
        """Each instruction's id, start and end."""
        for name, start, end in self.rows:
            yield str(name), float(start), float(end)


def _read_module(text: str) -> _Module:
    """The computations by id, and the instructions by theirs, in one pass over the lines."""
    entry = ""
    computations: dict[str, _Computation] = {}
    instructions: dict[str, _Instruction] = {}
    ids: dict[str, str] = {}
    computation, instruction = _Computation(), _Instruction()
    for match in _MODULE.finditer(text):
        kind = match.lastgroup or ""
        value = match.group(kind)
        if kind == "dimension":
            instruction.dimensions += 1
        elif kind == "instruction":
            instruction = _Instruction()
            computation.instructions.append(instruction)
        elif kind == "id":
            instructions[value] = instruction
        elif kind == "computation":
            computation = _Computation()
        elif kind == "computation_name":
            computation.name = value
        elif kind == "computation_id":
            computations[value] = computation
            ids[computation.name] = value
        elif kind == "entry":
            entry = value
        else:
            _note(instruction, kind, value)
    return _Module(ids.get(entry, ""), computations, instructions)


def _note(instruction: _Instruction, kind: str, value: str) -> None:
    if kind == "name":
        instruction.name = value
    elif kind == "opcode":
        instruction.opcode = value
    elif kind == "called":
        instruction.called.append(value)
    elif kind == "direction":
        instruction.direction = value
    elif kind == "trips":
        instruction.trips = int(value)
    else:
        instruction.constant = int(value)


def _read_schedules(text: str) -> list[_Schedule]:
    found: list[_Schedule] = []
    for match in _SCHEDULES.finditer(text):
        kind = match.lastgroup or ""
        value = match.group(kind)
        if kind == "schedule":
            found.append(_Schedule())
        elif kind == "id":
            found[-1].rows.append([value, 0.0, 0.0])
        elif kind in ("start", "end"):
            found[-1].rows[-1][1 if kind == "start" else 2] = float(value)
        elif kind == "computation":
            found[-1].computation = value
        else:
            found[-1].rate = float(value)
    return found


# -- the walk from the entry --------------------------------------------------------------------


@dataclass
class _Walk:
    """Adds up the entry and the runs of what it calls: only control flow nests, a few deep."""

    module: _Module
    schedules: Mapping[str, _Schedule]
    spans: list[Span] = field(default_factory=list[Span])
    untimed: list[str] = field(default_factory=list[str])

    def through(self, computation: str, runs: int) -> tuple[float, float]:
        """Seconds, and exposed seconds, of one run of a computation with all that it calls."""
        seconds, exposed = self._own(computation, runs)
        for instruction in self.module.computations[computation].instructions:
            more, waited = self._inside(instruction, runs)
            seconds, exposed = seconds + more, exposed + waited
        return seconds, exposed

    def _own(self, computation: str, runs: int) -> tuple[float, float]:
        here = self.module.computations[computation]
        schedule = self.schedules.get(computation)
        if schedule is None:
            if any(i.is_work for i in here.instructions) and here.name not in self.untimed:
                self.untimed.append(here.name)
            return 0.0, 0.0
        rate = 1e6 * schedule.rate
        for name, start, end in schedule.times():
            instruction = self.module.instructions[name]
            self.spans.append(
                Span(
                    instruction.name, instruction.opcode, start / rate, end / rate, here.name, runs
                )
            )
        return schedule.end / rate, (schedule.end - schedule.busy) / rate

    def _inside(self, instruction: _Instruction, runs: int) -> tuple[float, float]:
        """What an instruction's computations take, where it is control flow."""
        if instruction.opcode == "while":
            body, condition = instruction.called
            trips = instruction.trips or self._trips(condition)
            seconds, exposed = self.through(body, runs * trips)
            return trips * seconds, trips * exposed
        if instruction.opcode == "conditional":
            return max((self.through(c, runs) for c in instruction.called), default=(0.0, 0.0))
        if instruction.opcode == "call":
            return self.through(instruction.called[0], runs)
        return 0.0, 0.0

    def _trips(self, condition: str) -> int:
        """What a loop's condition compares its counter with, from 0 by 1; 1 if it is not told."""
        inside = list(self._reached(condition))
        limits = {i.constant for i in inside if i.opcode == "constant" and i.constant is not None}
        directions = {i.direction for i in inside if i.direction}
        if len(limits) != 1 or len(directions) != 1:
            return 1
        return max(limits.pop() + (directions.pop() in ("LE", "GE")), 1)

    def _reached(self, computation: str) -> Iterator[_Instruction]:
        for instruction in self.module.computations[computation].instructions:
            yield instruction
            for called in instruction.called:
                yield from self._reached(called)
