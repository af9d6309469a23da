"""The time that a compiler itself gives a program: a timeline on GPUs, cycles on TPUs.

XLA's latency-hiding scheduler dumps a timeline of GPU programs; libtpu writes the cycles that it
expects of a kernel into the optimized HLO.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster.catalog import ENTRIES, entry_named
from autopar.errors import ClusterError
from autopar.hlo.module import CALLS, Computation, Instruction, Module, read_module, trip_count
from autopar.ir.compiled import Span

# -- GPUs ------------------------------------------------------------------------------------------

# The dump holds the module and, of each computation with an async collective, when its instructions
# start and end. A loop takes no time in the computation around it, so its runs are added here.
#
# It is a text proto of megabytes whose nesting is told by its indents, two spaces each.
_MODULE = re.compile(
    r"^(?:  entry_computation_name: \"(?P<entry>[^\"]*)\""
    r"|(?P<computation>  computations \{)"
    r"|    name: \"(?P<computation_name>[^\"]*)\""
    r"|    id: (?P<computation_id>\d+)"
    r"|(?P<instruction>    instructions \{)"
    r"|      name: \"(?P<name>[^\"]*)\""
    r"|      opcode: \"(?P<opcode>[^\"]*)\""
    r"|      id: (?P<id>\d+)"
    r"|      operand_ids: (?P<operand>\d+)"
    r"|        (?:  )?element_type: (?P<dtype>\w+)"
    r"|          dimensions: (?P<leaf_dimension>\d+)"
    r"|        dimensions: (?P<dimension>\d+)"
    r"|      called_computation_ids: (?P<called>\d+)"
    r"|      comparison_direction: \"(?P<direction>\w+)\""
    r"|      backend_config: \".*kind\W+__(?P<backend>triton)\W.*"
    r"|      backend_config: \".*lhs_(?P<batched>batch)_dimensions\W+\d.*"
    r"|      custom_call_target: \"(?P<target>AllocateBuffer)\""
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


# Kernels by Triton, such as a softmax or a norm as one, are given 10 ns whatever they do. And a
# product is given what XLA's table has for one of its size, times the batch. The smallest there are
# of 256 by 256 by 256: whatever is smaller gets the 24 TFLOPS that such a product reaches alone on
# an H100. A batch of them runs at once, and is bound by memory. So 1,024 products of attention over
# 256 tokens, 64 wide, are given 359 us, and their bytes take 60. And memory that a loop is given as
# it is found takes no time, where XLA has what it has for any call of a library.
_SMALLEST_IN_TABLE, _FILLING_BATCH = 256, 128
_ITEM_BITS = {
    "PRED": 8, "S8": 8, "U8": 8, "S16": 16, "U16": 16, "S32": 32, "U32": 32, "S64": 64, "U64": 64,
    "F8E4M3FN": 8, "F8E5M2": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


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


def read_timeline(
    schedule_text: str, bytes_per_second: float = math.inf
) -> CompilerTimeline | None:
    """The step's timeline of a `*.schedule.txt` dump.

    Triton's kernels, of which XLA's model knows nothing, take what their bytes do in a chip's
    memory, as all others that move them do in that model.

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
    for schedule in schedules.values() if math.isfinite(bytes_per_second) else ():
        schedule.stretch(module, bytes_per_second)
    walk = _Walk(module, schedules)
    seconds, exposed = walk.through(module.entry, 1)
    return CompilerTimeline(seconds, exposed, tuple(walk.spans), tuple(walk.untimed))


# -- what the dump holds ------------------------------------------------------------------------


@dataclass
class _Instruction:
    name: str = ""
    opcode: str = ""
    operands: list[str] = field(default_factory=list[str])
    shapes: list[list[int]] = field(default_factory=list[list[int]])  # bits an item, and sizes
    backend: str = ""
    dimensions: int = 0
    called: list[str] = field(default_factory=list[str])
    direction: str = ""
    trips: int = 0
    constant: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that comes out."""
        return sum(math.prod(shape) // 8 for shape in self.shapes)

    def is_of_small_products(self, inputs: Sequence[_Instruction]) -> bool:
        """True if it is a product of so large a batch that it fills a chip, of small matrices."""
        if self.backend != "batch" or len(inputs) < 2:
            return False
        # Beside the result comes scratch.
        _, *batch, rows, columns = next(shape for shape in self.shapes if shape[0])
        left, right = (math.prod(i.shapes[0][1:]) for i in inputs[:2])
        count = math.prod(batch)
        summed = math.isqrt(left * right // (count * count * rows * columns))
        return count >= _FILLING_BATCH and max(rows, columns, summed) <= _SMALLEST_IN_TABLE

    @property
    def is_work(self) -> bool:
        """True if a device spends time on it worth telling: more than a scalar comes out."""
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

    def runs(self, instruction: _Instruction, opcode: str) -> bool:
        """True if a computation that an instruction calls has one of such an opcode."""
        called = (self.computations.get(c, _Computation()) for c in instruction.called)
        return any(i.opcode == opcode for c in called for i in c.instructions)


@dataclass
class _Schedule:
    """The times at which the instructions of one computation run, in cycles."""

    computation: str = ""
    rows: list[list[float | str]] = field(default_factory=list[list[float | str]])
    rate: float = 1.0

    @property
    def end(self) -> float:
        """The end of the last instruction.

        The dump's own total_cycles is more: it adds up the whole latency of every collective, also
        of those that run beside work.
        """
        return max((end for _, _, end in self.times()), default=0.0)

    @property
    def busy(self) -> float:
        """Cycles in which instructions run; a collective runs between its start and its done."""
        return sum(end - start for _, start, end in self.times())

    @property
    def is_made_up(self) -> bool:
        """True if every time is a whole number, as no model's are."""
        return all(start == int(start) and end == int(end) for _, start, end in self.times())

    def stretch(self, module: _Module, bytes_per_second: float) -> None:
        """Give kernels that XLA's model knows nothing of their time, and move what follows them.

        Those are Triton's, batches of small products, and memory that is taken as it is found. And
        copies to or from stacks, which run beside work one after the other: XLA has 5 ms for any.

        A collective takes as long as it was seen to, from its start to where it was waited for; no
        wait grows, as it may have been done long before that.
        """
        own = module.instructions
        lengths: dict[str, float] = {}
        copies: dict[str, float] = {}  # by their starts
        for name, start, end in self.times():
            kernel, inputs = own[name], [own[o] for o in own[name].operands if o in own]
            moved = sum(i.nbytes for i in inputs) + kernel.nbytes
            taken = moved / bytes_per_second * 1e6 * self.rate
            if kernel.backend == "triton":
                lengths[name] = max(taken, end - start)
            elif kernel.backend == "AllocateBuffer":
                lengths[name] = 0.0
            elif taken and kernel.is_of_small_products(inputs):
                lengths[name] = taken
            elif kernel.opcode == "async-start" and module.runs(kernel, "fusion"):
                row = min((i.nbytes for i in inputs if i.shapes and i.shapes[0][1:]), default=0)
                copies[name] = 2 * min(row, kernel.nbytes) / bytes_per_second * 1e6 * self.rate
        if not lengths and not copies:
            return
        waits = {
            n: own[n].operands[0] for n, _, _ in self.times() if own[n].opcode.endswith("-done")
        }
        begun, latest = set(waits.values()), ""
        clock = before = 0.0
        ended: dict[str, tuple[float, float]] = {}
        copied: dict[str, float] = {}  # when each copy ends, the last one last
        rows: list[list[float | str]] = []
        for name, start, end in sorted(self.times(), key=lambda row: row[1]):
            # A gap is a wait for a collective: the one that is done, or the last that was started.
            # Behind the start of a copy it is part of the 5 ms, and counts for nothing.
            started = waits.get(name, latest)
            if started in copies:
                clock = max(clock, copied.get(waits.get(name, ""), 0.0))
            elif start > before and started in ended:
                old, new = ended[started]
                clock = min(max(clock, new + start - old), clock + start - before)
            elif start > before:
                clock += start - before
            begins, clock = clock, clock + lengths.get(name, end - start)
            rows.append([name, begins, clock])
            before = max(before, end)
            ended[name] = end, clock
            if name in copies:
                copied[name] = max(clock, next(reversed(copied.values()), 0.0)) + copies[name]
            latest = name if name in begun else latest
        self.rows = rows

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
            instruction.shapes[-1:] = [[*part, int(value)] for part in instruction.shapes[-1:]]
        elif kind == "leaf_dimension":  # of a tuple, or of a constant's literal
            instruction.shapes[-1:] = [[*part, int(value)] for part in instruction.shapes[-1:]]
        elif kind == "dtype":
            instruction.shapes.append([_ITEM_BITS.get(value, 0)])
        elif kind == "operand":
            instruction.operands.append(value)
        elif kind in ("backend", "batched", "target"):
            instruction.backend = value
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
        elif kind == "name":
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
    return _Module(ids.get(entry, ""), computations, instructions)


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
    """Adds up the entry and the runs of what it calls: only control flow nests, a few deep.

    seconds(c) = the end of c's own schedule, in which control flow takes no time, and of

        while          trips * seconds(body)
        conditional    the longest branch
        call           seconds(what is called)
    """

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
        """Seconds of the computations that a control flow instruction runs."""
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
        """The constant that a loop's condition compares its counter with; 1 if there is none."""
        inside = list(self._reachable(condition))
        limits = {i.constant for i in inside if i.opcode == "constant" and i.constant is not None}
        directions = {i.direction for i in inside if i.direction}
        if len(limits) != 1 or len(directions) != 1:
            return 1
        return max(limits.pop() + (directions.pop() in ("LE", "GE")), 1)

    def _reachable(self, computation: str) -> Iterator[_Instruction]:
        for instruction in self.module.computations[computation].instructions:
            yield instruction
            for called in instruction.called:
                yield from self._reachable(called)


# -- TPUs ------------------------------------------------------------------------------------------

# After code generation most instructions carry `estimated_cycles`. Those of matmuls, and of what is
# fused into them, are good to 15 %. Those of other kernels are 2.5 to 4.5 times the time that their
# bytes take, so such a kernel is given the smaller of the two. Collectives carry none.

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**60  # and above: what some TPU7x ops hold


@dataclass(frozen=True)
class KernelTime:
    """Seconds of a step's kernels on one device, loops by their trips.

    `matmul_seconds` are matmuls with what is fused into them, `other_seconds` all other kernels.
    `unpriced` are kernels of the user's own (Pallas), of which the compiler says nothing.
    """

    matmul_seconds: float
    other_seconds: float
    unpriced: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Kernels one after the other; collectives are left out."""
        return self.matmul_seconds + self.other_seconds


def clock_of(chip: str) -> float:
    """Cycles a second of a TPU chip of the catalog; raises ClusterError for any other."""
    entry = entry_named(chip)
    if entry is None or entry.clock_mhz is None:
        known = ", ".join(e.chip.name for e in ENTRIES if e.clock_mhz is not None)
        raise ClusterError(f"no clock of {chip!r} is known; those of {known} are")
    return entry.clock_mhz * 1e6


def read_cycles(
    hlo_text: str, cycles_per_second: float, bytes_per_second: float
) -> KernelTime | None:
    """The time of the kernels of `compiled.as_text()`; None where no kernel has an estimate.

    `bytes_per_second` is what streaming reaches on one device. Of a conditional's branches the one
    that takes longest counts.
    """
    if not _CYCLES.search(hlo_text):
        return None
    module = read_module(hlo_text)
    walk = _KernelWalk(module, cycles_per_second, bytes_per_second)
    return walk.through(module.computations[module.entry])


@dataclass(frozen=True)
class _KernelWalk:
    module: Module
    cycles_per_second: float
    bytes_per_second: float

    def through(self, computation: Computation) -> KernelTime:
        """A single run of a computation with all that it calls."""
        return _sum(self._of(i, computation) for i in computation.instructions)

    def _of(self, instruction: Instruction, around: Computation) -> KernelTime:
        if instruction.opcode == "while":
            trips = trip_count(instruction, around, self.module)
            body = self._callees(instruction, "body")
            seconds = body.matmul_seconds * trips, body.other_seconds * trips
            return KernelTime(*seconds, body.unpriced)
        if instruction.opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [self._through(name) for name in instruction.callees(*keys)]
            return max(branches, key=lambda b: b.seconds, default=KernelTime(0.0, 0.0))
        if instruction.opcode in ("call", "async-start"):
            return self._callees(instruction, *CALLS)
        return self._kernel(instruction, around)

    def _callees(self, instruction: Instruction, *keys: str) -> KernelTime:
        return _sum(self._through(name) for name in instruction.callees(*keys))

    def _through(self, name: str) -> KernelTime:
        found = self.module.computations.get(name)
        return self.through(found) if found else KernelTime(0.0, 0.0)

    def _kernel(self, instruction: Instruction, around: Computation) -> KernelTime:
        backend = instruction.attributes.get("backend_config", "")
        found = _CYCLES.search(backend)
        if found is None or int(found.group(1)) >= _NO_ESTIMATE:
            is_own = "tpu_custom_call" in instruction.attributes.get("custom_call_target", "")
            return KernelTime(0.0, 0.0, (instruction.name,) if is_own else ())
        seconds = int(found.group(1)) / self.cycles_per_second
        # A matmul or convolution, alone or with others fused into its output.
        if (
            instruction.opcode in ("convolution", "dot")
            or instruction.attributes.get("kind") == "kOutput"
            or "COST_MODEL_TYPE_CLASSIC" in backend
        ):
            return KernelTime(seconds, 0.0)
        # Bytes read and written, wherever they lie: what is in VMEM was fetched for this use.
        read = (around.by_name[o].leaves for o in instruction.operands if o in around.by_name)
        nbytes = sum(leaf.nbytes for leaves in (instruction.leaves, *read) for leaf in leaves)
        return KernelTime(0.0, min(seconds, nbytes / self.bytes_per_second))


def _sum(times: Iterator[KernelTime]) -> KernelTime:
    matmul, other, unpriced = 0.0, 0.0, list[str]()
    for time in times:
        matmul += time.matmul_seconds
        other += time.other_seconds
        unpriced += time.unpriced
    return KernelTime(matmul, other, tuple(unpriced))
