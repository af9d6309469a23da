"""The structure of a compiled program: computations and instructions of optimized HLO text.

    HloModule jit_f, num_partitions=8
    %body (p: f32[8]) -> f32[8] {
      ROOT %name = f32[8]{0} all-reduce(%a, %b), replica_groups={{0,1}}, metadata={...}
    }

Only the shape of the text is read here; the rooms beside this tell what the instructions mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_OPENING, _CLOSING = "([{", ")]}"
# A quoted text is one mark, so that what it holds is none.
_MARK = re.compile(r'"(?:\\.|[^"\\])*"?|[ ,()\[\]{}]')
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-~]+)\s*(\(.*->.*)?\{\s*$")
_NAME = re.compile(r"(ROOT\s+)?%?([\w.\-~]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_LEAF = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_REFERENCE = re.compile(r"%?([A-Za-z_][\w.\-~]*)")
_ENTRY_OF_TABLE = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})\s*$')
# The attributes that name a computation which runs as part of an instruction.
CALLS = ("calls", "to_apply", "called_computations", "async_wrapped")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4}


@dataclass(frozen=True)
class Leaf:
    """An array type: dtype and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            found = re.match(r"[a-z]+(\d+)", self.dtype)
            bits = int(found.group(1)) if found else 32
        return (math.prod(self.dims) * bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """A line: its name, result type (tuples flattened), opcode, operands and attributes."""

    name: str
    leaves: tuple[Leaf, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: Mapping[str, str]
    is_root: bool

    def callees(self, *keys: str) -> tuple[str, ...]:
        """The names of the computations that some attributes refer to."""
        names: list[str] = []
        for key in keys:
            names += _REFERENCE.findall(self.attributes.get(key, ""))
        return tuple(names)


@dataclass(frozen=True)
class Computation:
    """A named list of instructions, with who uses whom."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: Mapping[str, Instruction] = field(repr=False)
    users: Mapping[str, tuple[Instruction, ...]] = field(repr=False)

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value is the result."""
        return next((i for i in self.instructions if i.is_root), None)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """The instructions that stand for the arguments, in their order."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal or 0)))


@dataclass(frozen=True)
class Module:
    """The computations of a module by name, and the number of devices it runs on."""

    computations: Mapping[str, Computation]
    entry: str
    device_count: int
    # stack_frame_id -> "file:line", from the tables at the top of newer modules.
    frames: Mapping[str, str]


def read_module(text: str) -> Module:
    """The structure of `compiled.as_text()`; lines of no known form are passed over."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", list[Instruction]()
    tables: dict[str, dict[str, str]] = {}
    table = ""
    head = ""
    for raw in text.splitlines():
        line = raw.strip()
        if name:
            if line.startswith("}"):
                computations[name] = _computation(name, lines)
                name = ""
            elif found := _instruction(line):
                lines.append(found)
        elif line.startswith("HloModule"):
            head = line
        elif header := _HEADER.match(line):
            name, lines = header.group(2), []
            entry = name if header.group(1) else entry
        elif item := _ENTRY_OF_TABLE.match(line):
            tables.setdefault(table, {})[item.group(1)] = item.group(2) or item.group(3) or ""
        elif line.isalpha():
            table = line
    entry = entry or next(reversed(computations), "")
    counts = [re.search(rf"{key}=(\d+)", head) for key in ("num_partitions", "replica_count")]
    devices = math.prod(int(count.group(1)) for count in counts if count)
    return Module(computations, entry, devices, _frames(tables))


def _frames(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    files = tables.get("FileNames", {})
    places: dict[str, str] = {}
    for number, body in tables.get("FileLocations", {}).items():
        at = dict(re.findall(r"(\w+)=(\d+)", body))
        places[number] = f"{files.get(at.get('file_name_id', ''), '?')}:{at.get('line', '0')}"
    frames: dict[str, str] = {}
    for number, body in tables.get("StackFrames", {}).items():
        at = dict(re.findall(r"(\w+)=(\d+)", body))
        frames[number] = places.get(at.get("file_location_id", ""), "")
    return frames


def _computation(name: str, lines: list[Instruction]) -> Computation:
    users: dict[str, list[Instruction]] = {}
    for line in lines:
        for operand in dict.fromkeys(line.operands):
            users.setdefault(operand, []).append(line)
    return Computation(
        name,
        tuple(lines),
        {line.name: line for line in lines},
        {value: tuple(by) for value, by in users.items()},
    )


def _instruction(line: str) -> Instruction | None:
    line = _COMMENT.sub("", line)
    start = _NAME.match(line)
    if start is None:
        return None
    at = start.end()
    # A tuple type is balanced; an array type ends at the first space outside its layout.
    if line[at : at + 1] == "(":
        after = _closing_bracket(line, at)
    else:
        after = next((end for end in _outside(line, at) if line[end] == " "), len(line))
    opcode = _OPCODE.match(line, after)
    if opcode is None:
        return None
    closed = _closing_bracket(line, opcode.end() - 1)
    inside = line[opcode.end() : closed - 1]
    # Older text puts each operand's type before its name.
    last_words = (part.split()[-1] for part in split_top(inside))
    operands = (name.group(1) for word in last_words if (name := _REFERENCE.fullmatch(word)))
    pairs = (part.split("=", 1) for part in split_top(line[closed:]) if "=" in part)
    return Instruction(
        name=start.group(2),
        leaves=tuple(read_leaves(line[at:after])),
        opcode=opcode.group(1),
        operands=tuple(operands),
        literal=inside.strip(),
        attributes={key.strip(): entry.strip() for key, entry in pairs},
        is_root=bool(start.group(1)),
    )


def read_leaves(text: str) -> Iterator[Leaf]:
    """The array types in a type text, in order: "(f32[2,3]{1,0}, u32[])" has two."""
    for dtype, dims in _LEAF.findall(text):
        yield Leaf(dtype, tuple(int(d) for d in re.findall(r"\d+", dims)))


def split_top(text: str) -> list[str]:
    """Parts of a text between the commas that no bracket or quote encloses."""
    parts: list[str] = []
    start = 0
    for at in _outside(text, 0):
        if text[at] == ",":
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _outside(text: str, start: int) -> Iterator[int]:
    """Positions of spaces, commas and brackets that nothing encloses, from `start` on."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        char = mark.group()
        depth -= char in _CLOSING
        if depth == 0 and char[0] != '"':
            yield mark.start()
        depth += char in _OPENING


def _closing_bracket(text: str, start: int) -> int:
    """The position just after the bracket that closes the one at `start`."""
    spots = _outside(text, start)
    next(spots, None)
    return next(spots, len(text) - 1) + 1


# -- how often a loop runs -------------------------------------------------------------------------

#     start = tuple(0, ..)    while i < 12    body: i + 1        (12 - 0) / 1 trips
_TRIPS = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')


def trip_count(loop: Instruction, around: Computation, module: Module) -> int:
    """The trips of a while: known_trip_count, or what its condition, start and step amount to.

    TPU writes no known_trip_count. There the condition compares a counter with one constant; where
    its start or step cannot be told they are 0 and 1, and where the condition cannot, 1 is said.
    """
    if found := _TRIPS.search(loop.attributes.get("backend_config", "")):
        return int(found.group(1))
    inside = list(_reachable(loop.callees("condition"), module))
    compares = [i for i in inside if i.opcode == "compare"]
    limits = {value for i in inside if (value := _integer(i)) is not None}
    directions = {i.attributes.get("direction", "") for i in compares}
    if len(limits) != 1 or len(directions) != 1:
        return 1
    # Counting up: `i < N`, or `N > i` with the sides swapped.
    end = limits.pop() + (directions.pop() in ("LE", "GE"))
    index = _counter(compares[0], loop, module)
    start = _start(loop, index, around)
    return max(-((start - end) // _step(loop, index, module)), 1)


def _reachable(names: tuple[str, ...], module: Module) -> Iterator[Instruction]:
    """The instructions of some computations and of those that they call."""
    for name in names:
        computation = module.computations.get(name)
        for instruction in computation.instructions if computation else ():
            yield instruction
            yield from _reachable(instruction.callees(*CALLS), module)


def _integer(instruction: Instruction) -> int | None:
    is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal)
    return int(instruction.literal) if is_number else None


def _counter(compare: Instruction, loop: Instruction, module: Module) -> int:
    """The element of a loop's state that its condition compares; -1 if that cannot be told."""
    for name in loop.callees("condition"):
        condition = module.computations.get(name)
        for operand in compare.operands:
            source = condition.by_name.get(operand) if condition else None
            if source and source.opcode == "get-tuple-element":
                return int(source.attributes.get("index", "-1"))
    return -1


def _start(loop: Instruction, index: int, around: Computation) -> int:
    state = around.by_name.get(loop.operands[0]) if loop.operands else None
    if index < 0 or state is None or state.opcode != "tuple" or index >= len(state.operands):
        return 0
    source = around.by_name.get(state.operands[index])
    while source and source.opcode == "copy":
        source = around.by_name.get(source.operands[0])
    return (_integer(source) if source else None) or 0


def _step(loop: Instruction, index: int, module: Module) -> int:
    """The number that a body adds to the counter."""
    for name in loop.callees("body"):
        body = module.computations.get(name)
        root = body.root if body else None
        if body is None or root is None or not 0 <= index < len(root.operands):
            continue
        added = body.by_name.get(root.operands[index])
        if added and added.opcode == "add":
            parts = (body.by_name.get(operand) for operand in added.operands)
            steps = [value for p in parts if p and (value := _integer(p)) is not None]
            return max(steps[0], 1) if steps else 1
    return 1
