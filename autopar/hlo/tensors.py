"""A collective of a compiled program: what it moves, whose it is, and between which devices."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.hlo.module import Computation, Instruction, Leaf, Module
from autopar.ir.listing import CollectiveKind
from autopar.ir.sharding import MeshShape

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_DEVICES = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?\)")  # `([2,4]T(1,0))`: no shape of its own
_MESH = re.compile(r"@?\w*mesh\[([^\]]*)\](.*)\{([^}]*)\}\s*$")
_AXIS = re.compile(r"'?\"?([A-Za-z_]\w*)'?\"?=(\d+)")
_CHOSEN = re.compile(r"'?\"?([A-Za-z_]\w*)'?\"?(?::\((\d+)\)(\d+))?")


def read_groups(attributes: Mapping[str, str], device_count: int) -> Groups:
    """The groups of a collective, over devices 0 to device_count - 1.

    Reads replica_groups as lists `{{0,1},{2,3}}`, iota `[2,4]<=[4,2]T(1,0)` and mesh
    `mesh['a'=2,'b'=4] {'b'}`, the axes behind what says which device is where in it, and
    source_target_pairs as the sets that pairs connect.
    No groups, or empty ones, mean all devices.
    """
    if "source_target_pairs" in attributes:
        return join_pairs(_lists(attributes["source_target_pairs"]))
    text = f"{attributes.get('replica_groups', '')}{attributes.get('device_ids', '')}"
    if found := _IOTA.match(text):
        shape, dims, order = (_numbers(part or "") for part in found.groups())
        flat = _transpose(dims, order or tuple(range(len(dims))))
        width = shape[-1] if len(shape) > 1 else math.prod(shape)
        return _split(flat, width)
    if found := _MESH.match(text):
        return _on_mesh(found.group(1), found.group(2), found.group(3))
    return _lists(text) or (tuple(range(device_count)),)


def axes_of(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The axes that groups of mesh positions run over: () where they are those of no axes.

    Positions count row-major. Groups of one device are taken to be left out.
    """
    wanted = {frozenset(group) for group in groups}
    names = mesh.splitting
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            # The groups along these axes: the positions with those dims innermost, cut into rows.
            grouped = [dim for dim, name in enumerate(mesh.names) if name in axes]
            rest = [dim for dim, name in enumerate(mesh.names) if name not in axes]
            flat = _transpose(mesh.sizes, (*rest, *grouped))
            if {frozenset(group) for group in _split(flat, mesh.size(axes))} == wanted:
                return axes
    return ()


def axes_crossed(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The axes along which the devices of any group differ from each other."""
    places = {at: place for at, place in enumerate(itertools.product(*map(range, mesh.sizes)))}
    return tuple(
        name
        for dim, name in enumerate(mesh.names)
        if any(len({places[at][dim] for at in group if at in places}) > 1 for group in groups)
    )


def _split(flat: Sequence[int], width: int) -> Groups:
    return tuple(tuple(flat[at : at + width]) for at in range(0, len(flat), width))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _lists(text: str) -> Groups:
    groups = (_numbers(inner) for inner in re.findall(r"\{([\d,\s]*)\}", text))
    return tuple(group for group in groups if group)


def _transpose(dims: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """0, 1, 2, ... laid out as `dims`, read with its dims in another order."""
    strides = [math.prod(dims[at + 1 :]) for at in range(len(dims))]
    flat: tuple[int, ...] = (0,)
    for at in reversed(order):
        flat = tuple(step * strides[at] + n for step in range(dims[at]) for n in flat)
    return flat


def _on_mesh(axes: str, between: str, chosen: str) -> Groups:
    """Groups along some axes, or parts of axes `'a':(2)4` (4 after 2 bigger parts), of a mesh."""
    names: list[str] = []
    dims: list[int] = []
    wanted = {name: (int(pre or 1), size) for name, pre, size in _CHOSEN.findall(chosen)}
    grouped: list[int] = []
    rest: list[int] = []
    for name, size in _AXIS.findall(axes):
        pre, part = wanted.get(name, (1, "1"))
        inner = int(part) if part else int(size)
        for piece, taken in ((pre, False), (inner, True), (int(size) // pre // inner, False)):
            (grouped if taken and name in wanted else rest).append(len(dims))
            dims.append(piece)
            names.append(name)
    flat = _transpose(dims, (*rest, *grouped))
    if found := _IOTA.search(axes + between) or _DEVICES.search(between):
        ids, order = (_numbers(part or "") for part in found.groups()[-2:])
        devices = _transpose(ids, order or tuple(range(len(ids))))
        flat = tuple(devices[n] for n in flat)
    return _split(flat, math.prod(dims[at] for at in grouped))


def join_pairs(sets: Groups) -> Groups:
    """The sets of devices that overlapping sets connect, each in rising order."""
    root: dict[int, int] = {}

    def find(device: int) -> int:
        while root.setdefault(device, device) != device:
            device = root[device]
        return device

    for first, *others in sets:
        find(first)
        for other in others:
            low, high = sorted((find(first), find(other)))
            root[high] = low
    members: dict[int, list[int]] = {}
    for device in sorted(root):
        members.setdefault(find(device), []).append(device)
    return tuple(tuple(group) for group in members.values())


# -- origins ---------------------------------------------------------------------------------------

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_COMBINED = re.compile(r"((?:.*/)?)\(([^()]*/[^()]*:[^()]*)\)(.*)")
_FILE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LINE = re.compile(r"[^/]+\.py:\d+")
# What JAX puts around the user's own scopes.
_WRAPPER = re.compile(r"p?jit\([^/]*\)|shard_map|call_exported|while|body|cond|closed_call")
_FAR = 6  # instructions back to one that still has metadata


@dataclass(frozen=True)
class Origin:
    """An op's name with its scopes, and "file:line"; both are "" where the compiler lost them."""

    op_name: str = ""
    line: str = ""

    @property
    def scope(self) -> str:
        """The op's name without what JAX puts around the user's scopes, and without the line."""
        parts = [p for p in self.op_name.split("/") if not _LINE.fullmatch(p)]
        while parts and _WRAPPER.fullmatch(parts[0]):
            parts = parts[1:]
        return "/".join(parts)

    @property
    def is_scoped(self) -> bool:
        """True if a scope says the user's line: a planned step is emitted so."""
        return any(_LINE.fullmatch(part) for part in self.op_name.split("/"))


def origin_of(instruction: Instruction, module: Module) -> Origin:
    """The origin in an instruction's metadata; of several that were combined the first's."""
    return origins_of(instruction, module)[0]


def origins_of(instruction: Instruction, module: Module) -> tuple[Origin, ...]:
    """The origins in an instruction's metadata: one, or those of the ops that GPU combined into it.

    Their names are "same/(one:other)". A line among the scopes is the user's.
    """
    metadata = instruction.attributes.get("metadata", "")
    found = _OP_NAME.search(metadata)
    names = [found.group(1) if found else ""]
    if combined := _COMBINED.fullmatch(names[0]):
        before, several, after = combined.groups()
        # No name starts with a digit, but "file.py:12" has a colon before one.
        names = [before + name + after for name in re.split(r":(?!\d)", several)]
    # The line that the metadata states counts where no scope has one.
    stated = ""
    if file := _FILE.search(metadata):
        stated = f"{file.group(1)}:{file.group(2) or 0}"
    elif frame := _FRAME.search(metadata):
        stated = module.frames.get(frame.group(1), "")
    origins: list[Origin] = []
    for name in names:
        scoped = [part for part in name.split("/") if _LINE.fullmatch(part)]
        origins.append(Origin(name, scoped[-1] if scoped else stated))
    return tuple(origins)


def origin_behind(name: str, computation: Computation, module: Module) -> Origin:
    """The origin of a value: of the instruction that made it, or of the nearest before that."""
    for _ in range(_FAR):
        instruction = computation.by_name.get(name)
        if instruction is None:
            break
        origin = origin_of(instruction, module)
        if origin.is_scoped or not instruction.operands:
            return origin
        # What is written into zeros is the value, not the zeros.
        name = instruction.operands[instruction.opcode == "dynamic-update-slice"]
    return Origin()


def origin_after(
    collective: Instruction, at: int, computation: Computation, module: Module
) -> Origin:
    """The origin of what first uses an element of a combined collective's result."""
    users = computation.users.get(collective.name, ())
    dones = [user.name for user in users if user.opcode.endswith("-done")]
    elements = [
        user.name
        for name in dones or [collective.name]
        for user in computation.users.get(name, ())
        if user.attributes.get("index") == str(at)
    ]
    for _ in range(_FAR):
        users = tuple(user for name in elements for user in computation.users.get(name, ()))
        origins = (origin_of(user, module) for user in users)
        if scoped := next((origin for origin in origins if origin.is_scoped), None):
            return scoped
        elements = [user.name for user in users]
    return Origin()


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HloPart:
    """A tensor of a collective: HLO's dtype, the whole local buffer in bytes, its origin."""

    dtype: str
    nbytes: int
    origin: Origin


def parts_of(
    collective: Instruction,
    members: Sequence[int],
    times: int,
    computation: Computation,
    module: Module,
) -> tuple[HloPart, ...]:
    """The tensors of some operands, `times` as big as those are.

    XLA combines collectives into one of many operands or (GPU's all-reduces) of one operand,
    their concatenation. Where the op then has not the origins of all, theirs is that of what made
    or uses them.
    """
    tensors = [t for at in members for t in _tensors(collective, at, computation, module)]
    # An all-to-all that is written as a tuple: its operands are the blocks of one tensor.
    is_split = (
        collective.opcode.removesuffix("-start") == "all-to-all"
        and "dimensions" not in collective.attributes
        and len(collective.operands) > 1
    )
    if tensors and is_split:
        whole = sum(leaf.nbytes for leaf, _ in tensors)
        return (HloPart(tensors[0][0].dtype, whole * times, origin_of(collective, module)),)
    return tuple(HloPart(leaf.dtype, leaf.nbytes * times, origin) for leaf, origin in tensors)


def _tensors(
    collective: Instruction, at: int, computation: Computation, module: Module
) -> Iterator[tuple[Leaf, Origin]]:
    name = collective.operands[at]
    producer = computation.by_name.get(name)
    # XLA pads a value so that a scatter's blocks are whole tiles; such a pad is nobody's code.
    if producer and producer.opcode == "pad" and not origin_of(producer, module).op_name:
        name = producer.operands[0]
        producer = computation.by_name.get(name)
    if producer is None:
        return
    own = origins_of(collective, module)
    joined = _joined(producer, computation, module)
    pieces = joined or (name,)
    every = len(pieces) if joined else len(collective.operands)
    for place, piece in enumerate(pieces, 0 if joined else at):
        made = computation.by_name.get(piece)
        if len(own) == every and own[place].op_name:
            origin = own[place]
        else:
            # The op has at best the origin of the first tensor: what made or uses this one says it.
            used = Origin() if joined else origin_after(collective, at, computation, module)
            origin = origin_behind(piece, computation, module)
            if not origin.is_scoped:
                first = own[0] if place == 0 or not own[0].is_scoped else Origin()
                origin = used if used.is_scoped else first
        for leaf in made.leaves if made else ():
            yield leaf, origin


def _joined(
    producer: Instruction, computation: Computation, module: Module
) -> tuple[str, ...] | None:
    """The values that XLA laid end to end to make one; None if it did not."""
    if producer.opcode == "concatenate":
        return None if origin_of(producer, module).op_name else producer.operands
    if producer.opcode != "fusion":
        return None
    inner = module.computations.get(next(iter(producer.callees("calls")), ""))
    root = inner.root if inner else None
    if inner is None or root is None or root.opcode != "concatenate":
        return None
    if origin_of(root, module).op_name or origin_of(producer, module).op_name:
        return None
    given = {p.name: name for p, name in zip(inner.parameters, producer.operands, strict=False)}
    names = tuple(given.get(_behind_bitcasts(piece, inner), "") for piece in root.operands)
    return names if all(computation.by_name.get(name) for name in names) else None


def _behind_bitcasts(name: str, computation: Computation) -> str:
    while (made := computation.by_name.get(name)) and made.opcode == "bitcast":
        name = made.operands[0]
    return name


# -- the collective --------------------------------------------------------------------------------


@dataclass(frozen=True)
class HloCollective:
    """A collective of a program and how often one step runs it.

    `kind` is what the op amounts to, not always its opcode. `parts` are the tensors that it moves,
    several where XLA combined them. `groups` are devices by their place in the device assignment,
    which is the mesh, row-major. `axes` are the mesh axes they run over (a permute's: those that it
    crosses), () where they are those of no axes, or no mesh was given.
    """

    kind: CollectiveKind
    name: str
    parts: tuple[HloPart, ...]
    groups: Groups
    trips: int
    origin: Origin
    axes: tuple[str, ...] = ()
    between_slices: bool = False

    @property
    def dtype(self) -> str:
        """HLO's dtype of the first tensor."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """The whole local buffer of one device and one run, in the sense of Prices.collective.

        That is the result of an all-gather, the operands of any other kind, without padding.
        """
        return sum(part.nbytes for part in self.parts)

    @property
    def op_name(self) -> str:
        """JAX's name of the op with its scopes, "" where the compiler lost it."""
        return self.origin.op_name

    @property
    def source(self) -> str:
        """The user's "file:line", "" where the compiler lost it."""
        return self.origin.line

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max(len(group) for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Bytes of all the runs in one step."""
        return self.nbytes * self.trips
