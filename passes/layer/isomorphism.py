"""Isomorphic ops and layers: equal but for the names of their values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.stages import LayerSequence

# A loop that repeats the first one leaves out few ops in a row: what only the first one returns.
_LONGEST_SKIP = 64

Numbers = dict[str, int]


def signature(op: Op, graph: Graph) -> Hashable:
    """The identity of an op but for its names: kind, parameters, types and bodies.

    Literals count by their type alone: a rate of dropout or of a schedule makes no other op.
    """
    operands = tuple((v.shape, v.dtype) for v in map(graph.value, op.operands))
    results = tuple((r.shape, r.dtype) for r in op.results)
    return op.kind, op.params, operands, results, tuple(map(_body, op.graphs))


def _body(graph: Graph) -> Hashable:
    number = {name: i for i, name in enumerate(graph.values)}
    ops = tuple((signature(op, graph), _number_operands(op.operands, number)) for op in graph.ops)
    inputs = tuple((i.value.shape, i.value.dtype) for i in graph.inputs)
    return inputs, ops, _number_operands(graph.outputs, number)


def _number_operands(operands: Sequence[Operand], number: Numbers) -> tuple[Hashable, ...]:
    return tuple(number[o] if isinstance(o, str) else None for o in operands)


def match_ops(graph: Graph, model: Sequence[int], copy: Sequence[int]) -> list[tuple[int, int]]:
    """Match equal ops of equal modules: pairs (op of `copy`, op of `model`), both in order."""

    def key(i: int) -> Hashable:
        return signature(graph.ops[i], graph), graph.ops[i].origin.module

    places: dict[Hashable, list[int]] = {}
    for at, i in enumerate(model):
        places.setdefault(key(i), []).append(at)
    pairs: list[tuple[int, int]] = []
    start = 0
    for i in copy:
        found = places.get(key(i), [])
        nearest = bisect_left(found, start)
        if nearest < len(found) and found[nearest] - start <= _LONGEST_SKIP:
            pairs.append((i, model[found[nearest]]))
            start = found[nearest] + 1
    return pairs


def find_classes(sequence: LayerSequence) -> LayerSequence:
    """Set `same_as` of each layer to the first layer that is isomorphic to it.

    Isomorphic layers have, in forward, backward and update, equal ops in equal order, wired alike
    within the layer, and read and hand on values of equal types from and to the same sides. Scalars
    of the update are left out.
    """
    ops = sequence.graph.ops
    members: list[list[int]] = [[] for _ in sequence.layers]
    for i, home in enumerate(sequence.homes):
        if home >= 0 and not _is_scalar_update(ops[i]):
            members[home].append(i)
    describe = _Describer(sequence)
    seen: dict[Hashable, int] = {}
    layers = tuple(
        replace(layer, same_as=first if first < k else -1)
        for k, layer in enumerate(sequence.layers)
        for first in (seen.setdefault(describe.layer(k, members[k]), k),)
    )
    return replace(sequence, layers=layers)


class _Describer:
    """Writes layers down so that equal ones read the same."""

    def __init__(self, sequence: LayerSequence) -> None:
        graph = sequence.graph
        self._graph = graph
        self._homes = [
            -1 if _is_scalar_update(op) else home
            for op, home in zip(graph.ops, sequence.homes, strict=True)
        ]
        self._maker = {r.name: i for i, op in enumerate(graph.ops) for r in op.results}
        self._inputs = {i.value.name: i.role for i in graph.inputs}
        self._readers: dict[str, set[int]] = {}
        for op, home in zip(graph.ops, self._homes, strict=True):
            for name in op.value_operands:
                self._readers.setdefault(name, set()).add(home)
        self._returned: dict[str, list[str]] = {}  # value -> the inputs that it replaces, or ""
        targets = {o: graph.inputs[i].value.name for o, i in graph.donated}
        for o, operand in enumerate(graph.outputs):
            if isinstance(operand, str):
                self._returned.setdefault(operand, []).append(targets.get(o, ""))

    def layer(self, k: int, members: Sequence[int]) -> Hashable:
        """The identity of a layer: its ops, with values numbered as they are met."""
        number: Numbers = {}  # names do not matter: %a, %b and %x, %y both read 0, 1
        rows: list[Hashable] = []
        for i in members:
            op = self._graph.ops[i]
            # An operand is its number, or if it is new also what it is and where it comes from.
            operands: list[Hashable] = []
            for operand in op.operands:
                if not isinstance(operand, str):
                    operands.append(None)
                elif operand in number:
                    operands.append(number[operand])
                else:
                    number[operand] = len(number)
                    value, role = self._graph.values[operand], self._inputs.get(operand)
                    side = _side(self._homes[self._maker[operand]], k) if role is None else role
                    operands.append((number[operand], side, value.shape, value.dtype))
            # A result is the sides that its readers are on, and the inputs that it replaces.
            results: list[Hashable] = []
            for value in op.results:
                number[value.name] = len(number)
                sides = {_side(home, k) for home in self._readers.get(value.name, ())}
                returned = self._returned.get(value.name, ())
                results.append((tuple(sorted(sides)), tuple(number.get(n, -1) for n in returned)))
            identity = signature(op, self._graph)
            rows.append((identity, op.origin.region, tuple(operands), tuple(results)))
        return tuple(rows)


def _is_scalar_update(op: Op) -> bool:
    return op.origin.region == "update" and all(r.item_count <= 1 for r in op.results)


def _side(home: int, k: int) -> str:
    return "anywhere" if home < 0 else "before" if home < k else "after" if home > k else "here"
