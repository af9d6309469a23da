"""How often a loop of optimized HLO runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.cost.hlo_text import CALLS, Computation, Instruction, Module

_TRIPS = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')


def trip_count(loop: Instruction, around: Computation, module: Module) -> int:
    """The trips of a while: known_trip_count, or what its condition, start and step amount to.

    TPU writes no known_trip_count. There the condition compares a counter with one constant; where
    its start or step cannot be told they are 0 and 1, and where the condition cannot, 1 is said.
    """
    if found := _TRIPS.search(loop.attributes.get("backend_config", "")):
        return int(found.group(1))
    inside = list(_reached(loop.called("condition"), module))
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


def _reached(names: tuple[str, ...], module: Module) -> Iterator[Instruction]:
    """Every instruction of some computations and of those that they call."""
    for name in names:
        computation = module.computations.get(name)
        for instruction in computation.instructions if computation else ():
            yield instruction
            yield from _reached(instruction.called(*CALLS), module)


def _integer(instruction: Instruction) -> int | None:
    is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal)
    return int(instruction.literal) if is_number else None


def _counter(compare: Instruction, loop: Instruction, module: Module) -> int:
    """Which element of a loop's state its condition compares; -1 if that cannot be told."""
    for name in loop.called("condition"):
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
    """What a body adds to the counter."""
    for name in loop.called("body"):
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
