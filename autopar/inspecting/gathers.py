"""Ops that must have a dim whole, or move it between devices, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.inspecting.divisors import divides
from autopar.inspecting.leaves import Leaf
from autopar.ir.findings import Finding, Severity, Topic
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.text import show_bytes
from autopar.ir.values import Value
from autopar.rules import REPLICATED

_LEAST_SHARE = 0.005  # of the bytes that all ops read and make


@dataclass(frozen=True)
class _Forced:
    """A dim of an operand that an op cannot have sharded, and why."""

    leaf: Leaf
    value: Value
    dim: int
    why: str
    is_all: bool  # no other dim of the operand can be sharded either

    @property
    def nbytes(self) -> int:
        """Bytes of the operand over all runs of a step."""
        return self.value.nbytes * self.leaf.runs


def gather_findings(leaves: Sequence[Leaf], devices: int) -> Iterator[Finding]:
    """A finding for each kind of op, line and reason, if enough bytes go through it.

    It is a warning where the whole operand must be gathered, else a note: another dim may be
    sharded at no cost.
    """
    total = sum(leaf.nbytes for leaf in leaves)
    groups: dict[object, list[_Forced]] = {}
    for leaf in leaves:
        for forced in _forced(leaf, devices):
            key = (leaf.op.kind, leaf.op.origin.line, forced.why, forced.is_all)
            groups.setdefault(key, []).append(forced)
    for group in groups.values():
        nbytes = sum(f.nbytes for f in group)
        if nbytes >= _LEAST_SHARE * total:
            yield _finding(group, nbytes)


def _finding(group: Sequence[_Forced], nbytes: int) -> Finding:
    first = max(group, key=lambda f: f.nbytes)
    op = first.leaf.op
    rest = ", and no other dim can be sharded" if first.is_all else ""
    remedy = "Work along a dim that stays whole, or on fewer bytes."
    if not first.is_all:
        remedy = "It costs nothing while that dim is not sharded: autopar weighs it."
    return Finding(
        Severity.WARNING if first.is_all else Severity.NOTE,
        Topic.GATHER,
        f"{op.kind} {first.why} dim {first.dim} of {first.value.type_text}{rest}: "
        f"{show_bytes(nbytes)} in a step to gather or move if it is sharded",
        remedy,
        line=op.origin.line,
        count=len({id(f.leaf) for f in group}),
        nbytes=nbytes,
    )


def _forced(leaf: Leaf, devices: int) -> Iterator[_Forced]:
    """The dims of an op's operands that an axis divides but that the op cannot have sharded."""
    rule = leaf.op.rule
    if rule is None or not rule.known or rule.on_demand or leaf.op.kind in REPLICATED:
        return
    free = rule.shardable()
    for value, dims in zip(leaf.operands, rule.operands, strict=True):
        if not value.name or value.dtype.startswith("key"):
            continue
        able = any(_divides_some(rule, dim, free, devices) for dim in dims)
        for d, (size, dim) in enumerate(zip(value.shape, dims, strict=True)):
            if divides(size, devices) and not _divides_some(rule, dim, free, devices):
                yield _Forced(leaf, value, d, _why(rule, dim, devices), not able)


def _divides_some(rule: Rule, dim: Dim, free: Sequence[int], devices: int) -> bool:
    return any(f in free and divides(rule.factors[f].size, devices) for f in dim)


def _why(rule: Rule, dim: Dim, devices: int) -> str:
    """The thing that the op does to a dim which forbids sharding it."""
    sizes = [rule.factors[f].size for f in dim]
    if len(dim) > 1:
        ways = " x ".join(map(str, sizes))
        first = next((n for n in sizes if n > 1), 1)
        odd = "" if divides(first, devices) else f", and no axis divides {first},"
        return f"reads as {ways}{odd}"
    kinds = {rule.factors[f].kind for f in dim}
    if Kind.PERMUTE in kinds:
        return "shifts items along"
    if kinds <= {Kind.REPLICATE}:
        return "needs all of"
    return "merges, as the minor part of a longer dim,"
