"""The collectives of a compiled program, read off its optimized HLO text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.collective import COLLECTIVE_KINDS, CollectiveKind
from autopar.errors import MeshError
from autopar.hlo.disguised import (
    belongs_to_another,
    in_every_slice,
    join_slices,
    lesser_kinds,
    transfer_of,
    window_of,
)
from autopar.hlo.groups import axes_crossed, axes_of, read_groups
from autopar.hlo.module import CALLS, Computation, Instruction, Module, read_module, trip_count
from autopar.hlo.tensors import HloCollective as HloCollective
from autopar.hlo.tensors import HloPart, origin_behind, origin_of, parts_of
from autopar.ir.compiled import CompiledCollective
from autopar.ir.mesh import MeshShape

# What the opcodes count as; a broadcast leaves every device with one's whole buffer.
_KINDS: dict[str, CollectiveKind] = {
    **{kind: kind for kind in COLLECTIVE_KINDS},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
}
_CHAIN = re.compile(r'chain_id="(\w+)"')


def read_collectives(
    hlo_text: str, mesh: MeshShape | None = None, order: Sequence[int] | None = None
) -> tuple[HloCollective, ...]:
    """Read the collectives of `compiled.as_text()`, in the order in which a step meets them.

    A start and its done count once; loop bodies count as often as they run (once where the
    count cannot be told); of a conditional's branches the one with most bytes counts. Groups of
    one device are left out. An all-reduce of which each device keeps only a slice counts as the
    reduce-scatter that it amounts to (XLA on CPU and TPU writes them so), a windowed einsum as its
    all-gather or reduce-scatter, and a send to other slices as the collective that it is part of.
    `order` has the number of the device at each position of the mesh, which only sends between
    slices ask for; without it they lie in order. Raises MeshError where the mesh has another number
    of devices than the program.
    """
    module = read_module(hlo_text)
    if module.entry not in module.computations:
        return ()
    if mesh is not None and mesh.device_count % module.device_count:
        raise MeshError(
            f"the program is compiled for {module.device_count} devices, the mesh {mesh} has "
            f"{mesh.device_count}; give the mesh that it was compiled for"
        )
    order = order or range(mesh.device_count if mesh else module.device_count)
    found = tuple(_Walk(module, tuple(order)).through(module.entry, 1))
    if mesh is None:
        return found
    # The groups as positions of the mesh, and the axes that they run over.
    placed: list[HloCollective] = []
    for c in found:
        groups = c.groups
        if not c.between_slices:
            groups = in_every_slice(groups, order, module.device_count)
        reached = axes_crossed if c.kind == "collective-permute" else axes_of
        placed.append(replace(c, groups=groups, axes=reached(groups, mesh)))
    return join_slices(placed, mesh)


def compiled_collectives(
    hlo_text: str, mesh: MeshShape, order: Sequence[int] | None = None
) -> tuple[CompiledCollective, ...]:
    """The tensors that collectives of a program move, in the order of `read_collectives`."""
    return tuple(
        CompiledCollective(
            c.kind, c.axes, short_dtype(part.dtype), part.nbytes, c.trips, part.origin.scope,
            part.origin.line,
        )
        for c in read_collectives(hlo_text, mesh, order)
        for part in c.parts
    )  # fmt: skip


def short_dtype(hlo_dtype: str) -> str:
    """Our name of HLO's dtype: i32 for s32, bool for pred; the others are the same."""
    if hlo_dtype == "pred":
        return "bool"
    return re.sub(r"^s(?=\d)", "i", hlo_dtype)


@dataclass
class _Walk:
    """A pass over a module, from the entry into whatever is called."""

    module: Module
    order: tuple[int, ...]
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
        if window := window_of(instruction, self.module):
            origin = origin_of(instruction, self.module)
            whole = window.block.nbytes * max(map(len, window.groups))
            part = HloPart(window.block.dtype, whole, origin)
            name, groups = instruction.name, window.groups
            yield HloCollective(window.kind, name, (part,), groups, trips, origin)
        elif opcode == "while":
            runs = trips * trip_count(instruction, computation, self.module)
            for name in instruction.callees("condition", "body"):
                yield from self.through(name, runs)
        elif opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [tuple(self.through(n, trips)) for n in instruction.callees(*keys)]
            yield from max(branches, key=lambda b: sum(c.total_bytes for c in b), default=())
        elif transfer := transfer_of(instruction, self.order):
            origin = origin_of(instruction, self.module)
            kind, groups = transfer.kind, transfer.groups
            times = max(map(len, groups)) if kind == "all-gather" else 1
            parts = parts_of(instruction, (0,), times, computation, self.module)
            name = instruction.name
            yield HloCollective(kind, name, parts, groups, trips, origin, between_slices=True)
        elif opcode.removesuffix("-start") in _KINDS:
            if self._is_new(instruction) and not belongs_to_another(
                instruction, computation, self.module
            ):
                yield from _read(instruction, computation, self.module, trips)
        # What waits for another instruction was counted where that started it.
        elif not opcode.endswith(("-done", "-update")) and not (
            opcode == "fusion" and "async-collective-done" in instruction.name
        ):
            yield from self._inside_call(instruction, computation, trips)

    def _inside_call(
        self, caller: Instruction, computation: Computation, trips: int
    ) -> Iterator[HloCollective]:
        """The collectives in what an instruction calls; one without origin gets the caller's."""
        own = origin_of(caller, self.module)
        for name in caller.callees(*CALLS):
            for found in self.through(name, trips):
                if found.op_name or found.source:
                    yield found
                    continue
                made = origin_behind(caller.operands[0], computation, self.module)
                origin = own if own.op_name else made
                parts = (replace(p, origin=p.origin if p.origin.op_name else origin)
                         for p in found.parts)  # fmt: skip
                yield replace(found, origin=origin, parts=tuple(parts))

    def _is_new(self, instruction: Instruction) -> bool:
        """True if this is no later part of an async collective that was counted.

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


def _read(
    instruction: Instruction, computation: Computation, module: Module, trips: int
) -> Iterator[HloCollective]:
    opcode = instruction.opcode.removesuffix("-start")
    groups = read_groups(instruction.attributes, module.device_count)
    groups = tuple(group for group in groups if len(group) > 1)
    if not groups:
        return
    # The operands after the first say where the rows of a ragged one go.
    count = 1 if opcode == "ragged-all-to-all" else len(instruction.operands)
    is_reduce = opcode == "all-reduce"
    less = lesser_kinds(instruction, computation, module) if is_reduce else {}
    kinds = dict.fromkeys((_KINDS[opcode], *COLLECTIVE_KINDS))
    for kind in kinds:
        members = [at for at in range(count) if less.get(at, _KINDS[opcode]) == kind]
        times = max(map(len, groups)) if opcode == "all-gather" else 1
        if parts := parts_of(instruction, members, times, computation, module):
            origin = origin_of(instruction, module)
            yield HloCollective(kind, instruction.name, parts, groups, trips, origin)
