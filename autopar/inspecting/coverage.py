"""The share of a step that can be sharded at all, and the primitives that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.inspecting.leaves import Leaf
from autopar.ir.findings import Coverage, Finding, Severity, Topic
from autopar.ir.graph import Op
from autopar.ir.text import show_bytes, show_count
from autopar.rules import REPLICATED

_SHOWN_LINES = 3


def coverage_of(leaves: Sequence[Leaf]) -> Coverage:
    """FLOPs and bytes of ops that have a rule which lets them be sharded, and of all."""
    covered = [leaf for leaf in leaves if not _is_whole(leaf.op)]
    return Coverage(
        sum(leaf.op.flops * leaf.runs for leaf in leaves),
        sum(leaf.op.flops * leaf.runs for leaf in covered),
        sum(leaf.nbytes for leaf in leaves),
        sum(leaf.nbytes for leaf in covered),
    )


def _is_whole(op: Op) -> bool:
    """True if the primitive runs whole on every device, for want of a rule or on purpose."""
    return op.rule is None or not op.rule.known or op.kind in REPLICATED


def rule_findings(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """A finding for each primitive without a rule, and each that is kept whole on purpose."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if _is_whole(leaf.op):
            groups.setdefault(leaf.op.kind, []).append(leaf)
    for kind, group in groups.items():
        rule = group[0].op.rule
        unknown = rule is None or not rule.known
        nbytes, flops = sum(g.nbytes for g in group), sum(g.op.flops * g.runs for g in group)
        why = "has no sharding rule" if unknown else f"is kept whole ({REPLICATED[kind]})"
        work = f", {show_count(flops, 'FLOP')}" if flops else ""
        lines = list(dict.fromkeys(g.op.origin.line for g in group if g.op.origin.line))
        also = f"; also at {', '.join(lines[1:_SHOWN_LINES])}" if len(lines) > 1 else ""
        yield Finding(
            Severity.WARNING if unknown else Severity.NOTE,
            Topic.NO_RULE,
            f"{kind} {why}: every device does all of it ({show_bytes(nbytes)}{work} a step){also}",
            f"Give it a rule: rules=RuleBook({{{kind!r}: ...}}), or write it in other operations.",
            line=lines[0] if lines else "",
            count=len(group),
            nbytes=nbytes,
        )
