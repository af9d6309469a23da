"""Which ops are homogeneous and linear in chosen operands: twice those makes twice the results."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import Graph, Op
from autopar.rules import primitive

# A maximum of maxima over parts is one over all.
_IDEMPOTENT = {"max": "max", "min": "min", "and": "and", "or": "or"}


def keeps_zero(op: Op) -> bool:
    """Whether zeros make zeros."""
    return primitive(op.kind).keeps_zero


def is_linear(op: Op, places: Collection[int], zeros: Collection[int], graph: Graph) -> bool:
    """Whether the results are linear in the operands at these places, those at `zeros` being 0.

    Rounding to a floating-point type counts as linear.
    """
    if op.kind == "convert_element_type":
        operand = graph.value(op.operands[0])
        return operand.dtype != "bool" and op.results[0].is_floating
    groups = op.rule.linear if op.rule is not None else ()
    return any(
        set(places) <= set(group) and set(group) - set(places) <= set(zeros) for group in groups
    )


def combines(op: Op, combiner: str) -> bool:
    """Whether the op brings parts of that combiner together, or only moves them."""
    return primitive(op.kind).moves or _IDEMPOTENT.get(op.kind) == combiner
