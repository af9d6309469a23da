"""Gives every op of a graph its rule."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Op
from autopar.ir.rule import Rule
from autopar.ir.values import Literal
from autopar.rules.custom import RuleBook
from autopar.rules.table import rule_for


def attach_rules(graph: Graph, book: RuleBook = RuleBook()) -> Graph:
    """The graph with a rule on each op; ops that hold bodies get theirs within."""
    return _attached(graph, book, {})


def unknown_ops(graph: Graph) -> tuple[Op, ...]:
    """Ops of a graph with rules whose primitive has none, the first of each primitive."""
    first: dict[str, Op] = {}
    for op in graph.walk():
        if op.rule is not None and not op.rule.known:
            first.setdefault(op.kind, op)
    return tuple(first.values())


def _attached(graph: Graph, book: RuleBook, seen: dict[object, Rule]) -> Graph:
    return replace(graph, ops=tuple(_with_rule(graph, op, book, seen) for op in graph.ops))


def _with_rule(graph: Graph, op: Op, book: RuleBook, seen: dict[object, Rule]) -> Op:
    if op.graphs:
        return replace(op, graphs=tuple(_attached(g, book, seen) for g in op.graphs))
    operands = tuple(graph.value(o) for o in op.operands)
    results = tuple((v.shape, v.dtype) for v in op.results)
    literals = tuple(o.text if isinstance(o, Literal) else None for o in op.operands)
    key = (op.kind, tuple((v.shape, v.dtype) for v in operands), literals, results, op.params)
    if key not in seen:
        try:
            seen[key] = rule_for(op, operands, book)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Rules trust that an op's parameters and shapes are those of its primitive.
            where = op.origin.line or op.origin.module or graph.name
            shapes = ", ".join(v.type_text for v in operands)
            raise GraphError(
                f"{op.kind} at {where} cannot take {shapes} with its parameters "
                f"({type(error).__name__}: {error})"
            ) from error
    return replace(op, rule=seen[key])
