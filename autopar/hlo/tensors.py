"""A collective of a compiled program: the tensors that it moves, and whose code they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.collective import CollectiveKind
from autopar.hlo.groups import Groups
from autopar.hlo.module import Computation, Instruction, Leaf, Module

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
