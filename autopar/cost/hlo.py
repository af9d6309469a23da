"""The collectives of a compiled program, read off its optimized HLO text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from autopar.cost.collective import COLLECTIVE_KINDS, CollectiveKind
from autopar.cost.hlo_groups import Groups, read_groups
from autopar.cost.hlo_text import Computation, Instruction, Leaf, Module, read_module

# Ops that only pass a value on, so what uses their result uses the value.
_PASSING = {"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element"}
_CALLS = ("calls", "to_apply", "called_computations", "async_wrapped")
_TRIPS = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_CHAIN = re.compile(r'chain_id="(\w+)"')
_SOURCE_FILE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')


@dataclass(frozen=True)
class HloCollective:
    """One collective of a program and how often one step runs it.

    `nbytes` is the whole local buffer of one device and one run, in the sense of
    Prices.collective: the result of an all-gather, the operands of any other kind, summed where
    several tensors are combined. `kind` is what the op amounts to, not always its opcode.
    """

    kind: CollectiveKind
    name: str
    dtype: str
    nbytes: int
    operands: int
    groups: Groups
    trips: int
    op_name: str
    source: str

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max(len(group) for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Bytes of all the runs in one step."""
        return self.nbytes * self.trips


def read_collectives(hlo_text: str) -> tuple[HloCollective, ...]:
    """Every collective of `compiled.as_text()`, in the order in which a step meets them.

    A start and its done count once; loop bodies count as often as they run (once where the
    count cannot be told); of a conditional's branches the one with most bytes counts. Groups of
    one device are left out. An all-reduce of which each device keeps only a slice counts as the
    reduce-scatter that it amounts to (XLA on CPU and TPU writes them so).
    """
    module = read_module(hlo_text)
    if module.entry not in module.computations:
        return ()
    return tuple(_Walk(module).through(module.entry, 1))


@dataclass
class _Walk:
    """One pass over a module, from the entry into whatever is called."""

    module: Module
    open_calls: list[str] = field(default_factory=list[str])
    chains: set[str] = field(default_factory=set[str])

    def through(self, name: str, trips: int) -> Iterator[HloCollective]:
        computation = self.module.computations.get(name)
        if computation is None or name in self.open_calls:
            return
        self.open_calls.append(name)
        for instruction in computation.instructions:
            yield from self._of(instruction, computation, trips)
        self.open_calls.pop()

    def _of(
        self, instruction: Instruction, computation: Computation, trips: int
    ) -> Iterator[HloCollective]:
        opcode = instruction.opcode
        if opcode == "while":
            runs = trips * _trip_count(instruction, self.module)
            for name in instruction.called("condition", "body"):
                yield from self.through(name, runs)
        elif opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [tuple(self.through(n, trips)) for n in instruction.called(*keys)]
            yield from max(branches, key=lambda b: sum(c.total_bytes for c in b), default=())
        elif opcode.removesuffix("-start") in COLLECTIVE_KINDS:
            if self._is_new(instruction):
                yield from _read(instruction, computation, self.module, trips)
        elif not _finishes(instruction):
            for name in instruction.called(*_CALLS):
                for found in self.through(name, trips):
                    # What is fused has often lost its metadata; the fusion has it.
                    yield replace(
                        found,
                        op_name=found.op_name or _op_name(instruction),
                        source=found.source or _source(instruction, self.module),
                    )

    def _is_new(self, instruction: Instruction) -> bool:
        """Whether this is no later part of an async collective that was counted.

        TPU fuses the parts of one collective into the work that hides it: the start, the fusions
        in between and the done each hold a copy of the op, with one chain_id.
        """
        chain = _CHAIN.search(instruction.attributes.get("frontend_attributes", ""))
        if chain is None:
            return True
        key = f"{chain.group(1)} {instruction.attributes.get('channel_id', '')}"
        new = key not in self.chains
        self.chains.add(key)
        return new


def _finishes(instruction: Instruction) -> bool:
    """Whether this waits for what another instruction started, and so was counted there."""
    if instruction.opcode.endswith(("-done", "-update")):
        return True
    return instruction.opcode == "fusion" and "async-collective-done" in instruction.name


def _read(
    instruction: Instruction, computation: Computation, module: Module, trips: int
) -> Iterator[HloCollective]:
    kind = cast(CollectiveKind, instruction.opcode.removesuffix("-start"))
    groups = read_groups(instruction.attributes, module.device_count)
    groups = tuple(group for group in groups if len(group) > 1)
    if not groups:
        return
    sliced = (
        _sliced_operands(instruction, computation, module) if kind == "all-reduce" else set[int]()
    )
    parts: list[tuple[CollectiveKind, list[int]]] = [
        (kind, [at for at in range(len(instruction.operands)) if at not in sliced]),
        ("reduce-scatter", sorted(sliced)),
    ]
    for part, members in parts:
        leaves = [leaf for at in members for leaf in _operand(instruction, at, computation)]
        nbytes = sum(leaf.nbytes for leaf in leaves)
        if not leaves:
            continue
        yield HloCollective(
            kind=part,
            name=instruction.name,
            dtype=leaves[0].dtype,
            nbytes=nbytes * (max(map(len, groups)) if part == "all-gather" else 1),
            operands=len(members),
            groups=groups,
            trips=trips,
            op_name=_op_name(instruction),
            source=_source(instruction, module),
        )


def _operand(instruction: Instruction, at: int, computation: Computation) -> tuple[Leaf, ...]:
    producer = computation.by_name.get(instruction.operands[at])
    return producer.leaves if producer else ()


def _op_name(instruction: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', instruction.attributes.get("metadata", ""))
    return found.group(1) if found else ""


def _source(instruction: Instruction, module: Module) -> str:
    """ "file:line" from the metadata, or "" where it has none."""
    metadata = instruction.attributes.get("metadata", "")
    if found := _SOURCE_FILE.search(metadata):
        return f"{found.group(1)}:{found.group(2) or 0}"
    frame = re.search(r"stack_frame_id=(\d+)", metadata)
    return module.frames.get(frame.group(1), "") if frame else ""


def _trip_count(loop: Instruction, module: Module) -> int:
    """How often a loop runs: known_trip_count, or the one constant its condition compares with.

    Without known_trip_count (TPU) the count starts at 0 and goes up by 1; 1 if it cannot be told.
    """
    if found := _TRIPS.search(loop.attributes.get("backend_config", "")):
        return int(found.group(1))
    constants: set[int] = set()
    directions: set[str] = set()
    waiting = list(loop.called("condition"))
    while waiting:
        computation = module.computations.get(waiting.pop())
        for instruction in computation.instructions if computation else ():
            waiting += instruction.called(*_CALLS)
            if instruction.opcode == "compare":
                directions.add(instruction.attributes.get("direction", ""))
            elif instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal):
                constants.add(int(instruction.literal))
    if len(constants) != 1 or len(directions) != 1:
        return 1
    limit, direction = constants.pop(), directions.pop()
    # Counting up: `i < N`, or `N > i` with the sides swapped.
    return max(limit + (direction in ("LE", "GE")), 1)


def _sliced_operands(reduce: Instruction, computation: Computation, module: Module) -> set[int]:
    """Which operands of an all-reduce come out only to be sliced by device."""
    every = set(range(len(reduce.operands)))
    # TPU: the all-reduce and its slice are one fusion whose computation has this name.
    if computation.name.startswith("all-reduce-scatter"):
        return every
    if reduce.opcode.endswith("-start"):
        done = [u for u in computation.users.get(reduce.name, ()) if u.opcode == "all-reduce-done"]
        result = done[0] if done else reduce
    else:
        result = reduce
    by_device = _by_device(computation, module)
    if len(every) == 1:
        return every if _one_slice(result.name, computation, module, by_device) else set()
    return {at for at in every if _element_sliced(result, at, computation, module, by_device)}


def _element_sliced(
    result: Instruction, at: int, computation: Computation, module: Module, by_device: set[str]
) -> bool:
    users = computation.users.get(result.name, ())
    takers = [u for u in users if u.attributes.get("index") == str(at)]
    if result.is_root or any(u.opcode != "get-tuple-element" for u in users):
        return False
    return bool(takers) and all(
        _one_slice(taker.name, computation, module, by_device) for taker in takers
    )


def _by_device(
    computation: Computation, module: Module, given: frozenset[str] = frozenset()
) -> set[str]:
    """Names of the values that depend on which device runs (`given` ones do)."""
    found = set(given)
    for instruction in computation.instructions:
        inner = [module.computations.get(name) for name in instruction.called("calls")]
        asks = any(
            i.opcode in ("partition-id", "replica-id") for c in inner if c for i in c.instructions
        )
        if asks or instruction.opcode in ("partition-id", "replica-id"):
            found.add(instruction.name)
        # A big value may differ by device as well; only small ones serve as offsets.
        elif found & set(instruction.operands) and all(
            leaf.nbytes <= 64 and leaf.dtype[0] in "su" for leaf in instruction.leaves
        ):
            found.add(instruction.name)
    return found


def _one_slice(value: str, computation: Computation, module: Module, by_device: set[str]) -> bool:
    """Whether a device keeps one slice of a value: of two different ones it needs the whole."""
    return len(_slice_shapes(value, computation, module, by_device) or ()) == 1


def _slice_shapes(
    value: str, computation: Computation, module: Module, by_device: set[str]
) -> set[tuple[Leaf, ...]] | None:
    """Shapes of the dynamic-slices at offsets that depend on the device; None for another use."""
    users = computation.users.get(value, ())
    if not users or computation.by_name[value].is_root:
        return None
    shapes: set[tuple[Leaf, ...]] = set()
    for user in users:
        found = _shapes_of_user(user, value, computation, module, by_device)
        if found is None:
            return None
        shapes |= found
    return shapes


def _shapes_of_user(
    user: Instruction, value: str, computation: Computation, module: Module, by_device: set[str]
) -> set[tuple[Leaf, ...]] | None:
    if user.opcode in _PASSING:
        return _slice_shapes(user.name, computation, module, by_device)
    if user.opcode == "dynamic-slice":
        is_slice = user.operands[0] == value and bool(by_device & set(user.operands[1:]))
        return {user.leaves} if is_slice else None
    if user.opcode not in ("fusion", "call"):
        return None
    inner = module.computations.get(next(iter(user.called("calls", "to_apply")), ""))
    if inner is None:
        return None
    inside = {at: inner.parameter(at) for at in range(len(user.operands))}
    given = frozenset(
        parameter.name
        for at, parameter in inside.items()
        if parameter and user.operands[at] in by_device
    )
    offsets = _by_device(inner, module, given)
    shapes: set[tuple[Leaf, ...]] = set()
    for at, parameter in inside.items():
        if user.operands[at] == value and parameter:
            found = _slice_shapes(parameter.name, inner, module, offsets)
            if found is None:
                return None
            shapes |= found
    return shapes
