"""The collectives of a compiled program, read off its optimized HLO text, disguised ones too.

A compiler writes some as something else:

an all-reduce of which each device keeps a slice    a reduce-scatter
an all-reduce of zeros but for a slice of each      an all-gather
a loop of matmuls and collective-permutes           an all-gather or a reduce-scatter
a send to the other slices of a TPU cluster         the collective that it is part of
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import MeshError
from autopar.hlo.module import (
    CALLS,
    Computation,
    Instruction,
    Leaf,
    Module,
    read_module,
    trip_count,
)
from autopar.hlo.tensors import (
    Groups,
    HloCollective,
    HloPart,
    axes_crossed,
    axes_of,
    join_pairs,
    origin_behind,
    origin_of,
    parts_of,
    read_groups,
)
from autopar.ir.compiled import CompiledCollective
from autopar.ir.listing import COLLECTIVES, CollectiveKind
from autopar.ir.sharding import MeshShape

# -- all-reduces of which only a slice is kept -----------------------------------------------------

# Ops that only pass a value on, so what uses their result uses the value.
PASSING = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element", "copy-start",
     "copy-done"}
)  # fmt: skip


def is_scatter(computation: str) -> bool:
    """True if TPU gives this name to the fusion of an all-reduce and each device's slice of it."""
    return computation.startswith("all-reduce-scatter")


def lesser_kinds(
    reduce: Instruction, computation: Computation, module: Module
) -> dict[int, CollectiveKind]:
    """The kinds, by place, of operands of an all-reduce that amount to less than one.

    Of an operand that comes out only to be sliced by device that is a reduce-scatter; of one that
    is zero but for the slice of each device an all-gather (TPU writes many small ones in one op).
    """
    if is_scatter(computation.name):
        return dict.fromkeys(range(len(reduce.operands)), "reduce-scatter")
    by_device = _by_device(computation, module)
    kinds: dict[int, CollectiveKind] = {}
    for at, name in enumerate(reduce.operands):
        if _is_own_slice(name, computation, module, by_device):
            kinds[at] = "all-gather"
        elif _is_sliced(reduce, at, computation, module, by_device):
            kinds[at] = "reduce-scatter"
    return kinds


def _is_sliced(
    reduce: Instruction, at: int, computation: Computation, module: Module, by_device: set[str]
) -> bool:
    users = computation.users.get(reduce.name, ())
    done = [user for user in users if user.opcode == "all-reduce-done"]
    result = done[0] if done else reduce
    if len(reduce.operands) == 1:
        return _one_slice(result.name, computation, module, by_device)
    # Of several operands each comes out as an element of a tuple.
    users = computation.users.get(result.name, ())
    takers = [u for u in users if u.attributes.get("index") == str(at)]
    if result.is_root or any(u.opcode != "get-tuple-element" for u in users):
        return False
    return bool(takers) and all(
        _one_slice(taker.name, computation, module, by_device) for taker in takers
    )


def _is_own_slice(name: str, computation: Computation, module: Module, by_device: set[str]) -> bool:
    made = computation.by_name.get(name)
    while made and made.opcode in PASSING and made.operands:
        made = computation.by_name.get(made.operands[0])
    if made is None:
        return False
    if made.opcode == "dynamic-update-slice":
        base, _, *offsets = made.operands
        return _is_zero(base, computation) and bool(by_device & set(offsets))
    inner = module.computations.get(next(iter(made.callees("calls")), ""))
    root = inner.root if inner and made.opcode == "fusion" else None
    if inner is None or root is None or root.opcode != "dynamic-update-slice":
        return False
    outer = {p.name: o for p, o in zip(inner.parameters, made.operands, strict=False)}
    base, _, *offsets = root.operands
    zero = _is_zero(base, inner) or _is_zero(outer.get(base, ""), computation)
    return zero and bool(by_device & {outer.get(o, "") for o in offsets})


def _is_zero(name: str, computation: Computation) -> bool:
    made = computation.by_name.get(name)
    while made and made.opcode in ("broadcast", *PASSING) and made.operands:
        made = computation.by_name.get(made.operands[0])
    return made is not None and made.opcode == "constant" and made.literal in ("0", "0.0")


def _by_device(
    computation: Computation, module: Module, given: frozenset[str] = frozenset()
) -> set[str]:
    """Names of the values that depend on which device runs (`given` ones do)."""
    found = set(given)
    for instruction in computation.instructions:
        inner = [module.computations.get(name) for name in instruction.callees("calls")]
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
    """True if a device keeps one slice of a value: of two different ones it needs the whole."""
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
    if user.opcode in PASSING:
        return _slice_shapes(user.name, computation, module, by_device)
    if user.opcode == "dynamic-slice":
        is_slice = user.operands[0] == value and bool(by_device & set(user.operands[1:]))
        return {user.leaves} if is_slice else None
    if user.opcode not in ("fusion", "call"):
        return None
    inner = module.computations.get(next(iter(user.callees("calls", "to_apply")), ""))
    if inner is None:
        return None
    given = frozenset(
        parameter.name
        for parameter, operand in zip(inner.parameters, user.operands, strict=False)
        if operand in by_device
    )
    offsets = _by_device(inner, module, given)
    shapes: set[tuple[Leaf, ...]] = set()
    for parameter, operand in zip(inner.parameters, user.operands, strict=False):
        if operand == value:
            found = _slice_shapes(parameter.name, inner, module, offsets)
            if found is None:
                return None
            shapes |= found
    return shapes


# -- windowed einsums ------------------------------------------------------------------------------

# A windowed einsum is a loop that hides a matmul and a collective behind each other. It passes the
# blocks of one operand (`_ag`) or of the result (`_rs`) around a ring by collective-permutes, one
# block a step: over the whole loop that is an all-gather or a reduce-scatter of as many blocks as
# there are devices. In two directions at once it takes half the steps.

_BODY = re.compile(r"windowed_dot_general_body(?:_(\w\w))?(?![a-z])")
_WINDOWED_KINDS: dict[str, CollectiveKind] = {"rs": "reduce-scatter"}


@dataclass(frozen=True)
class Window:
    """The collective of a windowed loop; `block` is what one device has before or after it."""

    kind: CollectiveKind
    block: Leaf
    groups: Groups


def window_of(loop: Instruction, module: Module) -> Window | None:
    """The collective that a while amounts to; None where it is no windowed einsum."""
    found = _BODY.search(loop.attributes.get("body", ""))
    body = module.computations.get(next(iter(loop.callees("body")), ""))
    if loop.opcode != "while" or found is None or body is None:
        return None
    permutes = [i for i in body.instructions if _is_permute(i)]
    passed = [body.by_name.get(i.operands[0]) for i in permutes]
    blocks = [leaf for value in passed if value for leaf in value.leaves]
    if not permutes or not blocks:
        return None
    groups = read_groups(permutes[0].attributes, module.device_count)
    kind = _WINDOWED_KINDS.get(found.group(1) or "", "all-gather")
    return Window(kind, max(blocks, key=lambda leaf: leaf.nbytes), groups)


def belongs_to_another(permute: Instruction, computation: Computation, module: Module) -> bool:
    """True if a permute is the first or last step of a windowed loop, or trims a fused scatter.

    Where the two directions of a loop's ring meet, one block is passed on outside the loop. A
    reduce-scatter that TPU padded to whole tiles hands what lies over the edge to the neighbour.
    """
    if not _is_permute(permute):
        return False
    return _comes_from(permute.operands[0], computation, module) or _goes_to(
        permute.name, computation, module
    )


def _is_permute(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") == "collective-permute"


def _comes_from(name: str, computation: Computation, module: Module) -> bool:
    while made := computation.by_name.get(name):
        if made.opcode not in PASSING and not _is_slice(made):
            scatters = made.opcode == "fusion" and any(map(is_scatter, made.callees("calls")))
            return scatters or window_of(made, module) is not None
        name = made.operands[0]
    return False


def _is_slice(instruction: Instruction) -> bool:
    """True if this cuts a value up, or is TPU's way to put the blocks of one together again."""
    is_async = instruction.opcode in ("async-start", "async-done")
    target = instruction.attributes.get("custom_call_target", "")
    return (
        instruction.opcode == "slice"
        or (is_async and instruction.name.startswith("slice-"))
        or "ConcatBitcast" in target
    )


def _goes_to(name: str, computation: Computation, module: Module) -> bool:
    """True if a value is used by nothing but a windowed loop's first state."""
    users = computation.users.get(name, ())
    return bool(users) and all(
        window_of(user, module) is not None
        or (
            (user.opcode in PASSING or user.opcode in ("tuple", "collective-permute-done"))
            and _goes_to(user.name, computation, module)
        )
        for user in users
    )


# -- sends between slices --------------------------------------------------------------------------

_SENT_KINDS: dict[str, CollectiveKind] = {
    kind.upper().replace("-", "_"): kind for kind in COLLECTIVES
}
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="([^"]*)"')
_PART = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")


@dataclass(frozen=True)
class Transfer:
    """The collective that a send to other slices is part of; `groups` hold mesh positions."""

    kind: CollectiveKind
    groups: Groups


def transfer_of(send: Instruction, order: Sequence[int]) -> Transfer | None:
    """The collective of a send; None where it does not leave its slice.

    The target "{1,2}x{0:15}" means slices 1 and 2 (counted from 1) and in each the devices 0 to
    15, which exchange with those of their own number. `order` has the device of each position.
    """
    attributes = send.attributes.get("frontend_attributes", "")
    kind, target = _KIND.search(attributes), _TARGET.search(attributes)
    if send.opcode != "send" or kind is None or target is None:
        return None
    known = _SENT_KINDS.get(kind.group(1), "collective-permute")
    position = {device: at for at, device in enumerate(order)}
    parts = [(_range(a), _range(b)) for a, b in _PART.findall(target.group(1))]
    slice_count = max((number for slices, _ in parts for number in slices), default=1)
    width = len(order) // slice_count
    groups: list[tuple[int, ...]] = []
    for slices, devices in parts:
        for device in devices:
            ids = [(number - 1) * width + device for number in slices]
            groups.append(tuple(sorted(position[i] for i in ids if i in position)))
    return Transfer(known, tuple(groups))


def _range(text: str) -> list[int]:
    """The numbers of "0:15" or "1,2"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def in_every_slice(groups: Groups, order: Sequence[int], width: int) -> Groups:
    """The mesh positions of groups that each slice of `width` devices has alike.

    A program for several slices is written for one; its devices are the slice's, in mesh order.
    """
    slices = [
        [at for at, device in enumerate(order) if device // width == number]
        for number in range(len(order) // width)
    ]
    return tuple(tuple(places[at] for at in group) for places in slices for group in groups)


# -- collectives over several slices ---------------------------------------------------------------

# Of n devices inside a slice, with V bytes in all (the part inside first, or last of a gather):
#
#     all-reduce       reduce-scatter V, all-reduce V/n between slices, all-gather V;
#                      small ones: all-reduce V, all-reduce V between slices
#     reduce-scatter   reduce-scatter V, all-reduce or reduce-scatter V/n between slices
#     all-gather       all-gather V/n between slices, all-gather V
#
# Which belong together is told by kind, dtype and bytes: between slices the compiler keeps no
# names.


def join_slices(found: Iterable[HloCollective], mesh: MeshShape) -> tuple[HloCollective, ...]:
    """The collectives of a program with the parts of each split one made one again.

    What runs over axes of the mesh as it is stays so, and so does a part whose like is not found.
    """
    # One collective for each tensor of those to be joined.
    every = [
        piece
        for c in found
        for piece in ([c] if c.axes else [replace(c, parts=(part,)) for part in c.parts])
    ]
    across = [c for c in every if c.between_slices and not c.axes]
    if not across:
        return tuple(every)
    inside = _Inside([c for c in every if not c.between_slices and not c.axes])
    whole: dict[int, HloCollective] = {}
    # An all-gather needs its one part; what is left of those may end an all-reduce.
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        for outer in (c for c in across if c.kind == kind):
            if made := inside.complete(outer, mesh):
                whole[id(outer)] = made
    taken = {id(c) for c in inside.taken}
    return tuple(whole.get(id(c), c) for c in every if id(c) not in taken)


@dataclass
class _Inside:
    """The parts inside slices that no part between them has claimed yet."""

    free: list[HloCollective]

    def __post_init__(self) -> None:
        self.taken: list[HloCollective] = []

    def complete(self, outer: HloCollective, mesh: MeshShape) -> HloCollective | None:
        """The whole collective that one between slices is part of; None if its like is not here."""
        scatter = "reduce-scatter" if outer.kind != "all-gather" else "all-gather"
        first = self._take(outer, scatter, shared=True)
        kind: CollectiveKind = outer.kind
        if first is None and outer.kind == "all-reduce":
            first = self._take(outer, "all-reduce", shared=False)
        elif first and outer.kind == "all-reduce":
            last = self._take(outer, "all-gather", shared=True)
            kind = "all-reduce" if last else "reduce-scatter"
        if first is None:
            return None
        groups = join_pairs((*first.groups, *outer.groups))
        origin = first.origin if first.origin.op_name else outer.origin
        axes = axes_of(groups, mesh)
        return replace(first, kind=kind, groups=groups, origin=origin, axes=axes)

    def _take(self, outer: HloCollective, kind: str, shared: bool) -> HloCollective | None:
        """The free part of a kind of which as many bytes (or each device's share) go between."""
        best, least = None, 0
        for part in self.free:
            share = part.nbytes // (part.group_size if shared else 1)
            excess = outer.nbytes - share
            alike = (part.kind, part.dtype, part.trips) == (kind, outer.dtype, outer.trips)
            # Whole tiles add 7 rows to one at most, and 4 KiB to next to nothing.
            padding = max(7 * share, 4096)
            if alike and 0 <= excess <= padding and (best is None or excess < least):
                best, least = part, excess
        if best:
            self.free.remove(best)
            self.taken.append(best)
        return best


# What the opcodes count as; a broadcast leaves every device with one's whole buffer.
_KINDS: dict[str, CollectiveKind] = {
    **{kind: kind for kind in COLLECTIVES},
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
    kinds = dict.fromkeys((_KINDS[opcode], *COLLECTIVES))
    for kind in kinds:
        members = [at for at in range(count) if less.get(at, _KINDS[opcode]) == kind]
        times = max(map(len, groups)) if opcode == "all-gather" else 1
        if parts := parts_of(instruction, members, times, computation, module):
            origin = origin_of(instruction, module)
            yield HloCollective(kind, instruction.name, parts, groups, trips, origin)
