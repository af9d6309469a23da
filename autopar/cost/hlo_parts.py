"""The tensors that one collective of optimized HLO moves, also where XLA combined several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.hlo_source import Origin, origin_after, origin_behind, origin_of, origins_of
from autopar.cost.hlo_text import Computation, Instruction, Leaf, Module


@dataclass(frozen=True)
class HloPart:
    """One tensor of a collective: HLO's dtype, the whole local buffer in bytes, its origin."""

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
    if tensors and _is_split(collective):
        whole = sum(leaf.nbytes for leaf, _ in tensors)
        return (HloPart(tensors[0][0].dtype, whole * times, origin_of(collective, module)),)
    return tuple(HloPart(leaf.dtype, leaf.nbytes * times, origin) for leaf, origin in tensors)


def _is_split(collective: Instruction) -> bool:
    """Whether the operands are the blocks of one tensor: an all-to-all written as a tuple."""
    kind = collective.opcode.removesuffix("-start")
    return (
        kind == "all-to-all"
        and "dimensions" not in collective.attributes
        and len(collective.operands) > 1
    )


def _tensors(
    collective: Instruction, at: int, computation: Computation, module: Module
) -> Iterator[tuple[Leaf, Origin]]:
    name = _unpadded(collective.operands[at], computation, module)
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
            used = Origin() if joined else origin_after(collective, at, computation, module)
            origin = _nearest(own[0], place == 0, origin_behind(piece, computation, module), used)
        for leaf in made.leaves if made else ():
            yield leaf, origin


def _nearest(own: Origin, is_first: bool, made: Origin, used: Origin) -> Origin:
    """The origin of one of several tensors whose op has at best the origin of the first alone."""
    if made.is_scoped or used.is_scoped:
        return made if made.is_scoped else used
    return own if is_first or not own.is_scoped else Origin()


def _unpadded(name: str, computation: Computation, module: Module) -> str:
    """The value that XLA padded, so that a scatter's blocks are whole tiles."""
    made = computation.by_name.get(name)
    is_pad = made is not None and made.opcode == "pad" and not origin_of(made, module).op_name
    return made.operands[0] if made and is_pad else name


def _joined(
    producer: Instruction, computation: Computation, module: Module
) -> tuple[str, ...] | None:
    """What XLA laid end to end to make a value; None if it did not (its own joins have no name)."""
    if producer.opcode == "concatenate":
        return None if origin_of(producer, module).op_name else producer.operands
    if producer.opcode != "fusion":
        return None
    inner = module.computations.get(next(iter(producer.called("calls")), ""))
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
