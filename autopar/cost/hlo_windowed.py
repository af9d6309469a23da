"""Loops that XLA makes of a matmul and a collective, so that each hides the other.

A windowed einsum passes the blocks of one operand (`_ag`) or of the result (`_rs`) around a ring by
collective-permutes, one block a step: over the whole loop that is an all-gather or a reduce-scatter
of as many blocks as there are devices. In two directions at once it takes half the steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.cost.collective import CollectiveKind
from autopar.cost.hlo_groups import Groups, read_groups
from autopar.cost.hlo_reduce import PASSING, is_scatter
from autopar.cost.hlo_text import Computation, Instruction, Leaf, Module

_BODY = re.compile(r"windowed_dot_general_body(?:_(\w\w))?(?![a-z])")
_KINDS: dict[str, CollectiveKind] = {"rs": "reduce-scatter"}


@dataclass(frozen=True)
class Window:
    """What a windowed loop amounts to; `block` is what one device has before or after it."""

    kind: CollectiveKind
    block: Leaf
    groups: Groups


def window_of(loop: Instruction, module: Module) -> Window | None:
    """The collective that a while amounts to; None where it is no windowed einsum."""
    found = _BODY.search(loop.attributes.get("body", ""))
    body = module.computations.get(next(iter(loop.called("body")), ""))
    if loop.opcode != "while" or found is None or body is None:
        return None
    permutes = [i for i in body.instructions if _is_permute(i)]
    passed = [body.by_name.get(i.operands[0]) for i in permutes]
    blocks = [leaf for value in passed if value for leaf in value.leaves]
    if not permutes or not blocks:
        return None
    groups = read_groups(permutes[0].attributes, module.device_count)
    kind = _KINDS.get(found.group(1) or "", "all-gather")
    return Window(kind, max(blocks, key=lambda leaf: leaf.nbytes), groups)


def belongs_to_another(permute: Instruction, computation: Computation, module: Module) -> bool:
    """Whether a permute is the first or last step of a windowed loop, or trims a fused scatter.

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
            return window_of(made, module) is not None or _is_fused_scatter(made)
        name = made.operands[0]
    return False


def _is_fused_scatter(instruction: Instruction) -> bool:
    return instruction.opcode == "fusion" and any(map(is_scatter, instruction.called("calls")))


def _is_slice(instruction: Instruction) -> bool:
    """Whether this cuts a value up, or is TPU's way to put the blocks of one together again."""
    is_async = instruction.opcode in ("async-start", "async-done")
    target = instruction.attributes.get("custom_call_target", "")
    return (
        instruction.opcode == "slice"
        or (is_async and instruction.name.startswith("slice-"))
        or "ConcatBitcast" in target
    )


def _goes_to(name: str, computation: Computation, module: Module) -> bool:
    """Whether a value is used by nothing but a windowed loop's first state."""
    users = computation.users.get(name, ())
    return bool(users) and all(
        window_of(user, module) is not None
        or (
            (user.opcode in PASSING or user.opcode in ("tuple", "collective-permute-done"))
            and _goes_to(user.name, computation, module)
        )
        for user in users
    )
