"""Tells whether two submeshes run the same thing, and hands the one's sharding to the other."""

from __future__ import annotations

import hashlib

from autopar.ir.graph import Graph, Operand
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.values import Value


def likeness(graph: Graph) -> str:
    """A hash of what a graph computes, its values known by their order and not by name."""
    return hashlib.sha256(repr(_skeleton(graph)).encode()).hexdigest()


def renamed(plan: ShardingPlan, before: Graph, after: Graph) -> ShardingPlan:
    """A plan of one graph as that of another that is like it."""
    names = dict(zip(before.nested_values, after.nested_values, strict=True))
    return ShardingPlan(
        plan.mesh,
        tuple((names[name], s) for name, s in plan.values),
        plan.assignments,
        tuple((names[name], region, s) for name, region, s in plan.uses),
        plan.shared_partials,
        plan.outcome,
    )


def _skeleton(graph: Graph) -> tuple[object, ...]:
    number = {name: i for i, name in enumerate(graph.values)}

    def known(operand: Operand) -> object:
        return number[operand] if isinstance(operand, str) else str(operand)

    inputs = tuple((_type(i.value), i.role.value) for i in graph.inputs)
    ops = tuple(
        (
            op.kind,
            tuple(map(known, op.operands)),
            tuple(_type(r) for r in op.results),
            op.params,
            op.origin.region,
            op.runs,
            tuple(map(_skeleton, op.graphs)),
        )
        for op in graph.ops
    )
    return inputs, ops, tuple(map(known, graph.outputs)), graph.donated


def _type(value: Value) -> str:
    return value.type_text
