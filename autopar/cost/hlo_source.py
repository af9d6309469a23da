"""Where an instruction of optimized HLO came from: JAX's name of the op and the user's line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.cost.hlo_text import Computation, Instruction, Module

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
        """Whether a scope says the user's line: a planned step is emitted so."""
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
    return tuple(_named(name, metadata, module) for name in _apart(found.group(1) if found else ""))


def _apart(op_name: str) -> list[str]:
    found = _COMBINED.fullmatch(op_name)
    if found is None:
        return [op_name]
    before, names, after = found.groups()
    # No name starts with a digit, but "file.py:12" has a colon before one.
    return [before + name + after for name in re.split(r":(?!\d)", names)]


def _named(op_name: str, metadata: str, module: Module) -> Origin:
    lines = [part for part in op_name.split("/") if _LINE.fullmatch(part)]
    return Origin(op_name, lines[-1] if lines else _stated(metadata, module))


def _stated(metadata: str, module: Module) -> str:
    if found := _FILE.search(metadata):
        return f"{found.group(1)}:{found.group(2) or 0}"
    frame = _FRAME.search(metadata)
    return module.frames.get(frame.group(1), "") if frame else ""


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
