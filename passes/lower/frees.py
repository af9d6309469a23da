"""Where registers are dropped after their last use, and whose buffers may be taken over."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.program import Free, Instruction, Part, Run, Send, Start
from autopar.ir.values import Role
from autopar.passes.lower.seats import Seat
from autopar.passes.lower.wires import Wires

Group = Sequence[Run | Send | Start]  # a run with what is sent after it, or one of the others


def freed(
    groups: Sequence[Group], parts: Sequence[Part], wires: Wires
) -> tuple[tuple[Instruction, ...], tuple[tuple[int, ...], ...]]:
    """The instructions with registers freed at their last use, and what each part may take over.

    A part that runs once takes over the buffers of state that nothing reads after it; these
    registers need not be freed. What is returned stays.
    """
    backward: list[Instruction] = []
    donated: list[tuple[int, ...]] = [()] * len(parts)
    seen: list[set[int]] = [set() for _ in wires.register_counts]
    for fetch in wires.fetches:
        seen[fetch.submesh].update(fetch.registers)
    for group in reversed(groups):
        last = {u: [r for r in dict.fromkeys(found) if r not in seen[u]]
                for u, found in _touched(group, parts).items()}  # fmt: skip
        for step in group:
            if isinstance(step, Run):
                donated[step.part] = _donated(step, parts[step.part], last)
                taken = {step.inputs[p] for p in donated[step.part]}
                mine = parts[step.part].submesh
                seen[mine] |= taken
                last[mine] = [r for r in last[mine] if r not in taken]
        for submesh, registers in last.items():
            seen[submesh].update(registers)
            if registers:
                backward.append(Free(submesh, tuple(registers)))
        backward += reversed(group)
    return tuple(reversed(backward)), tuple(donated)


def _touched(group: Group, parts: Sequence[Part]) -> dict[int, list[int]]:
    """Submesh -> the registers that a group reads or writes there."""
    found: dict[int, list[int]] = {}
    for step in group:
        if isinstance(step, Run):
            here = found.setdefault(parts[step.part].submesh, [])
            here += (*step.inputs, *step.accumulators, *step.outputs)
        elif isinstance(step, Send):
            found.setdefault(step.source, []).extend(p.source for p in step.parcels)
            found.setdefault(step.target, []).extend(p.target for p in step.parcels)
        else:
            found.setdefault(step.submesh, []).extend(step.registers)
    return found


def _donated(run: Run, part: Part, last: dict[int, list[int]]) -> tuple[int, ...]:
    """The positions of state that a part reads last, once."""
    if Seat.of(part).is_looped:
        return ()
    dying = frozenset(last[part.submesh])
    return tuple(
        p
        for p, (given, register) in enumerate(zip(part.graph.inputs, run.inputs, strict=True))
        if given.role is Role.STATE and register in dying and run.inputs.count(register) == 1
    )
