"""Submeshes that compute the same, whatever their values are called and whatever order ops have.

    layers 9, 10, 11 of a stage     layers 12, 13, 14 of another
    forward   9 10 11               12 13 14
    update    10 11 9               12 13 14        (by the names of parameters)

Nodes are inputs and ops. A node's color is what it is by itself, then also what the nodes around it
are, and so on outwards until no color splits (color refinement, after Weisfeiler and Leman). Ops of
a loop are told apart by their order from the start, as equal stages run them in one. Nodes of one
color are paired in order, and every pair is checked, so that what is found is an isomorphism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.program import SubmeshGraph
from autopar.ir.sharding_plan import OpPath, ShardingPlan
from autopar.ir.values import Value


@dataclass(frozen=True)
class Form:
    """A submesh's graph, and the colors of its inputs and then its ops: by themselves, refined."""

    joint: SubmeshGraph
    bases: tuple[int, ...]
    colors: tuple[int, ...]

    @property
    def key(self) -> object:
        """The colors in rising order, which isomorphic forms have in common."""
        return tuple(sorted(self.colors))


class Forms:
    """Numbers what nodes are, so that those of several graphs compare."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(
        self, joint: SubmeshGraph, marks: Sequence[object], of_value: Mapping[str, object]
    ) -> Form:
        """The form of a graph; `marks` tell ops apart, `of_value` the values of some names."""
        graph = joint.graph
        inputs = [
            self._number((i.value.type_text, i.role.value, of_value.get(i.value.name)))
            for i in graph.inputs
        ]
        ops = [
            self._number((mark, _alone(op), tuple(of_value.get(r.name) for r in op.results)))
            for op, mark in zip(graph.ops, marks, strict=True)
        ]
        bases = (*inputs, *ops)
        return Form(joint, bases, self._refined(graph, bases))

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _refined(self, graph: Graph, bases: tuple[int, ...]) -> tuple[int, ...]:
        """Colors that no further hop splits."""
        made = {i.value.name: (n, 0) for n, i in enumerate(graph.inputs)}
        first = len(graph.inputs)
        made.update(
            (r.name, (first + n, place))
            for n, op in enumerate(graph.ops)
            for place, r in enumerate(op.results)
        )
        reads = [[made[o] if isinstance(o, str) else None for o in op.operands] for op in graph.ops]
        read_by: list[list[tuple[int, int, int]]] = [[] for _ in bases]  # place, reader, slot
        for n, read in enumerate(reads):
            for slot, source in enumerate(read):
                if source is not None:
                    read_by[source[0]].append((source[1], first + n, slot))
        returned = dict(graph.donated)
        for o, operand in enumerate(graph.outputs):
            if isinstance(operand, str):
                maker, place = made[operand]
                # What replaces state is read by that state, anything else by nobody.
                read_by[maker].append((place, returned.get(o, -1), -1))
        colors, classes = list(bases), Counter(bases)
        while True:
            # A node that is alone in its color is told apart already.
            open_nodes = [n for n, color in enumerate(colors) if classes[color] > 1]
            near = [
                self._number((
                    colors[n],
                    n >= first and tuple(s and (colors[s[0]], s[1]) for s in reads[n - first]),
                    tuple(sorted((p, colors[r] if r >= 0 else -1, s) for p, r, s in read_by[n])),
                ))
                for n in open_nodes
            ]  # fmt: skip
            for n, color in zip(open_nodes, near, strict=True):
                colors[n] = color
            before, classes = len(classes), Counter(colors)
            if len(classes) == before:
                return tuple(colors)


def _alone(op: Op) -> object:
    """An op by itself: all but the values that it reads."""
    literals = tuple(None if isinstance(o, str) else str(o) for o in op.operands)
    types = tuple(r.type_text for r in op.results)
    bodies = tuple(map(_body, op.graphs))
    return op.kind, op.params, types, literals, op.origin.region, op.runs, bodies


def _body(graph: Graph) -> object:
    """A body, its values known by their order."""
    number = {name: i for i, name in enumerate(graph.values)}

    def known(operand: Operand) -> object:
        return number[operand] if isinstance(operand, str) else str(operand)

    ops = tuple((_alone(op), tuple(map(known, op.operands))) for op in graph.ops)
    inputs = tuple(i.value.type_text for i in graph.inputs)
    return inputs, ops, tuple(map(known, graph.outputs))


@dataclass(frozen=True)
class Match:
    """The values and ops of a graph that stand for those of another."""

    after: Graph
    names: Mapping[str, str]
    ops: tuple[int, ...]  # by op of the other

    @property
    def in_order(self) -> bool:
        """True if the ops stand in one order in both."""
        return self.ops == tuple(range(len(self.ops)))

    def plan(self, plan: ShardingPlan) -> ShardingPlan:
        """The other graph's plan for this one."""
        rank = {name: i for i, name in enumerate(self.after.nested_values)}

        def path(known: OpPath) -> OpPath:
            return self.ops[known[0]], *known[1:]

        values = ((self.names[name], s) for name, s in plan.values)
        uses = ((self.names[name], region, s) for name, region, s in plan.uses)
        assigned = ((path(p), given) for p, given in plan.assignments)
        partials = ((path(p), operands) for p, operands in plan.shared_partials)
        return replace(
            plan,
            values=tuple(sorted(values, key=lambda v: rank[v[0]])),
            assignments=tuple(sorted(assigned, key=lambda a: a[0][0])),
            uses=tuple(sorted(uses, key=lambda u: rank[u[0]])),
            shared_partials=tuple(sorted(partials, key=lambda p: p[0][0])),
        )


def match(before: Form, after: Form) -> Match | None:
    """The isomorphism of a form to another; None where pairs of one color do not make one."""
    one, other = before.joint.graph, after.joint.graph
    waiting: dict[int, list[int]] = {}
    for n, color in reversed(list(enumerate(after.colors))):
        waiting.setdefault(color, []).append(n)
    pairs: list[int] = []
    for n, color in enumerate(before.colors):
        left = waiting.get(color)
        if not left or before.bases[n] != after.bases[left[-1]]:
            return None
        pairs.append(left.pop())
    first = len(one.inputs)
    if len(pairs) != len(after.colors) or any(
        (n < first) != (m < first) for n, m in enumerate(pairs)
    ):
        return None
    names = dict(_names(one, other, pairs))
    ops = tuple(m - first for m in pairs[first:])

    def renamed(operand: Operand) -> object:
        return names[operand] if isinstance(operand, str) else str(operand)

    def shown(operand: Operand) -> object:
        return operand if isinstance(operand, str) else str(operand)

    for op, m in zip(one.ops, ops, strict=True):
        if tuple(map(renamed, op.operands)) != tuple(map(shown, other.ops[m].operands)):
            return None
    if Counter(_outputs(one, renamed, pairs)) != Counter(_outputs(other, shown, range(first))):
        return None
    return Match(other, names, ops)


def _names(one: Graph, other: Graph, pairs: Sequence[int]) -> Iterator[tuple[str, str]]:
    first = len(one.inputs)
    for given, m in zip(one.inputs, pairs, strict=False):
        yield given.value.name, other.inputs[m].value.name
    for op, m in zip(one.ops, pairs[first:], strict=True):
        twin = other.ops[m - first]
        yield from zip(map(_name, op.results), map(_name, twin.results), strict=True)
        for body, own in zip(op.graphs, twin.graphs, strict=True):
            yield from zip(body.nested_values, own.nested_values, strict=True)


def _name(value: Value) -> str:
    return value.name


def _outputs(
    graph: Graph, named: Callable[[Operand], object], place: Sequence[int]
) -> Iterator[tuple[object, int]]:
    """The outputs, each with the place of the input that it returns to."""
    returned = dict(graph.donated)
    for o, operand in enumerate(graph.outputs):
        yield named(operand), place[returned[o]] if o in returned else -1
