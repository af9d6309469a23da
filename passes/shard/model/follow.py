"""Finds ops that follow an operand's sharding, and ops to compute again where they are read."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Kind, Rule
from autopar.ir.values import Literal
from autopar.passes.shard.model.decisions import Place, Rematerializable, Standing


def spec(op: Op) -> tuple[tuple[str, ...] | None, ...]:
    """The dims of a with_sharding_constraint: their axes, None where one is open."""
    spec = op.param("spec")
    assert isinstance(spec, tuple)
    return tuple(tuple(str(a) for a in dim) if isinstance(dim, tuple) else None for dim in spec)


def label(op: Op) -> str:
    """The name of an op in errors and reports: its module and kind."""
    return f"{op.origin.module}/{op.kind}" if op.origin.module else op.kind


def is_pointwise(rule: Rule) -> bool:
    """True if all sharding passes through and each result dim is a factor of its own."""
    return (
        rule.known
        and all(f.kind is Kind.PASS for f in rule.factors)
        and all(len(dim) <= 1 for dims in (*rule.operands, *rule.results) for dim in dims)
    )


def is_rematerializable(op: Op, rule: Rule, standings: Sequence[Standing]) -> bool:
    """True if an op's result is made where it is read: iotas, broadcasts, what they alone feed."""
    if op.kind == "broadcast_in_dim" and any(isinstance(s, Place) for s in standings):
        return op.results[0].item_count > _operand_count(rule)
    if rule.on_demand:
        return True
    leaf = all(
        s is None or (isinstance(s, Rematerializable) and not s.has_source) for s in standings
    )
    small = bool(op.results) and not any(isinstance(o, Literal) and o.shape for o in op.operands)
    return leaf and small and is_pointwise(rule) and len(op.results) == 1


def _operand_count(rule: Rule) -> int:
    count = 1
    for dim in rule.operands[0]:
        for f in dim:
            count *= rule.factors[f].size
    return count


def renaming_of(rule: Rule, operand: int) -> tuple[int, ...] | None:
    """For each result dim the operand's dim it is, if every sharding passes both ways."""
    if not rule.known or any(f.kind is not Kind.PASS for f in rule.factors):
        return None
    shardable = set(rule.shardable())
    source: dict[int, int] = {}
    for d, dim in enumerate(rule.operands[operand]):
        major = rule.major(dim)
        if major is None:
            continue
        if major not in shardable:
            return None
        source[major] = d
    dims: list[int] = []
    for dim in rule.results[0]:
        major = rule.major(dim)
        if major is None:
            dims.append(-1)
        elif major in source:
            dims.append(source.pop(major))
        else:
            return None
    return tuple(dims) if not source else None
