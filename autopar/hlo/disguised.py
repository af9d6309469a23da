"""Collectives that a compiler writes as something else, and what they amount to.

an all-reduce of which each device keeps a slice    a reduce-scatter
an all-reduce of zeros but for a slice of each      an all-gather
a loop of matmuls and collective-permutes           an all-gather or a reduce-scatter
a send to the other slices of a TPU cluster         the collective that it is part of
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.cost.collective import COLLECTIVE_KINDS, CollectiveKind
from autopar.hlo.groups import Groups, axes_of, join_pairs, read_groups
from autopar.hlo.module import Computation, Instruction, Leaf, Module
from autopar.hlo.tensors import HloCollective
from autopar.ir.mesh import MeshShape

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
    kind.upper().replace("-", "_"): kind for kind in COLLECTIVE_KINDS
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
