"""Merges look-alike (isomorphic) ops into one: a deep model is read and priced as a few layers.

Ops of one class look alike within some hops: the same kind, types, rule and region, operands and
readers of equal classes, and so on outwards (color refinement, after Weisfeiler and Leman). They
are given one decision. The objective still counts every op: a class that reads from different
classes at different places keeps a variant for each, with how often it stands in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Role

Hashes = npt.NDArray[np.uint64]

# Odd constants of a multiplicative mix (splitmix64; Steele, Lea and Flood, 2014).
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP, _SLOT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True)
class Variant:
    """A class's op as it reads from some classes, and how many ops of the graph read so.

    `first` is the first of these in the whole graph: all that it reads was made before.
    """

    op: Op
    count: int
    first: int


@dataclass(frozen=True)
class Merged:
    """A graph and its merged form, in which op i is the first of class i.

    `classes[i]` is the class of op i of the whole graph. `homes` names for every value of the
    whole graph, bodies included, the value of the merged graph that stands for it.
    """

    whole: Graph
    graph: Graph
    classes: tuple[int, ...]
    variants: tuple[tuple[Variant, ...], ...]
    homes: Mapping[str, str]
    counts: Mapping[str, int]  # value of the merged graph -> values that it stands for

    def outputs(self) -> Iterator[tuple[Operand, str | None, int]]:
        """(merged operand, merged input that it returns to, how often) of the graph's outputs."""
        returns = dict(self.whole.donated)
        table: dict[tuple[Operand, str | None], int] = {}
        for i, operand in enumerate(self.whole.outputs):
            name = self.homes[operand] if isinstance(operand, str) else operand
            target = self.whole.inputs[returns[i]].value.name if i in returns else None
            key = (name, self.homes[target] if target is not None else None)
            table[key] = table.get(key, 0) + 1
        yield from ((name, target, count) for (name, target), count in table.items())


def unmerged(graph: Graph) -> Merged:
    """The partition with each op in a class of its own."""
    names = {name: name for name in graph.nested_values}
    variants = tuple((Variant(op, 1, i),) for i, op in enumerate(graph.ops))
    ones = dict.fromkeys(names, 1)
    return Merged(graph, graph, tuple(range(len(graph.ops))), variants, names, ones)


def merge_isomorphic(graph: Graph, hops: int, marks: Mapping[str, object]) -> Merged:
    """The graph with ops merged that look alike within `hops`.

    `marks` tell inputs apart by path: those with different marks, pins for instance, are never
    merged, nor are arguments that carry the batch.
    """
    wiring = wire(graph)
    classes = _numbered(_refined(wiring, _bases(graph, marks), hops))
    first, stop = wiring.input_count, wiring.first_output
    op_classes = _numbered(classes[first:stop].astype(np.uint64))
    leaders = np.unique(op_classes, return_index=True)[1]
    homes = _homes(wiring, classes, [graph.ops[i] for i in _listed(leaders)], op_classes)
    counts: dict[str, int] = {}
    for home in homes.values():
        counts[home] = counts.get(home, 0) + 1
    inner = Graph(
        graph.name,
        tuple(i for i in graph.inputs if i.value.name in counts),
        tuple(_renamed(graph.ops[i], homes) for i in _listed(leaders)),
        _renamed_all(graph.outputs, homes),
    )
    forms = _numbered(_read_from(wiring, classes)[first:stop])
    variants = _variants(graph, op_classes, forms, homes)
    return Merged(graph, inner, tuple(_listed(op_classes)), variants, homes, counts)


# -- colors ------------------------------------------------------------------------------------


def _bases(graph: Graph, marks: Mapping[str, object]) -> Hashes:
    """A hash for every node of what it is by itself."""
    kinds: dict[object, int] = {}
    keys = [
        ("input", i.role, i.value.shape, i.value.dtype, marks.get(i.path),
         n if i.role is Role.BATCH else -1)
        for n, i in enumerate(graph.inputs)
    ]  # fmt: skip
    numbers = [kinds.setdefault(key, len(kinds)) for key in keys]
    numbers += [kinds.setdefault(_op_key(op), len(kinds)) for op in graph.ops]
    numbers += [kinds.setdefault("output", len(kinds))] * len(graph.outputs)
    return _mixed(np.array(numbers, dtype=np.uint64) + _STEP)


def _op_key(op: Op) -> object:
    """The key that two ops must share; a rule object stands for kind, types and parameters."""
    if op.rule is not None and not op.graphs:
        return (id(op.rule), op.origin.region, op.runs)
    return _deep_key(op)


def _deep_key(op: Op) -> object:
    """The same for an op with bodies: everything in them, values by where they are made."""
    types = tuple((r.shape, r.dtype) for r in op.results)
    literals = tuple(o if not isinstance(o, str) else None for o in op.operands)
    bodies = tuple(_body_key(g) for g in op.graphs)
    return (op.kind, op.params, types, literals, op.origin.region, op.runs, bodies)


def _body_key(graph: Graph) -> object:
    number = {name: i for i, name in enumerate(graph.values)}

    def named(operand: Operand) -> object:
        return number[operand] if isinstance(operand, str) else operand

    ops = tuple((_deep_key(op), tuple(map(named, op.operands))) for op in graph.ops)
    inputs = tuple((i.value.shape, i.value.dtype) for i in graph.inputs)
    return (inputs, ops, tuple(map(named, graph.outputs)))


def _refined(wiring: Wiring, colors: Hashes, hops: int) -> Hashes:
    """A hash for every node of what stands within some hops of it.

    An op with bodies is a layer by itself: it sees one hop far.
    """
    layers = np.array([*_is_layer(wiring)], dtype=bool)
    makers = wiring.makers[wiring.sources]
    slots = _arc_hashes(wiring)
    for hop in range(hops):
        down = _summed(_mixed(colors[makers] + slots), wiring.readers, len(colors))
        up = _summed(_mixed(colors[wiring.readers] ^ (slots * _MIX_B)), makers, len(colors))
        seen = _mixed(_mixed(colors) + down + up)
        colors = np.where(layers, colors, seen) if hop else seen
    return colors


def _is_layer(wiring: Wiring) -> Iterator[bool]:
    """For every node whether it is an op with bodies."""
    yield from (False for _ in range(wiring.input_count))
    yield from (bool(op.graphs) for op in wiring.graph.ops)
    yield from (False for _ in wiring.graph.outputs)


def _read_from(wiring: Wiring, classes: Ints) -> Hashes:
    """A hash for every node of its class and the classes that it reads, slot by slot."""
    colors = _mixed(classes.astype(np.uint64) + _STEP)
    slots = _arc_hashes(wiring)
    seen = _mixed(colors[wiring.makers[wiring.sources]] + slots)
    found: Hashes = _mixed(colors + _summed(seen, wiring.readers, len(colors)))
    return found


def _arc_hashes(wiring: Wiring) -> Hashes:
    """A hash for every arc of which result is read, and as which operand."""
    slots = (wiring.slots.astype(np.uint64) + np.uint64(1)) * _SLOT
    hashes: Hashes = slots + wiring.places[wiring.sources].astype(np.uint64) * _STEP
    return hashes


def _mixed(x: Hashes) -> Hashes:
    """A bijective scramble of each 64-bit word."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _summed(words: Hashes, at: Ints, count: int) -> Hashes:
    """Words added up modulo 2**64 by where they go."""
    total = np.zeros(count, dtype=np.uint64)
    np.add.at(total, at, words)
    return total


def _numbered(colors: Hashes) -> Ints:
    """Equal colors get equal numbers, in order of first appearance."""
    _, first, inverse = np.unique(colors, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: Ints = rank[inverse]
    return numbered


def _listed(numbers: npt.NDArray[np.generic]) -> list[int]:
    return cast("list[int]", numbers.tolist())


# -- merging -----------------------------------------------------------------------------------


def _homes(
    wiring: Wiring, classes: Ints, leaders: Sequence[Op], op_classes: Ints
) -> dict[str, str]:
    """For every value, bodies included, the first value of its class."""
    keys = classes[wiring.makers] * (int(wiring.places.max(initial=0)) + 1) + wiring.places
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    names = wiring.names
    homes = dict(zip(names, (names[i] for i in _listed(first[inverse])), strict=True))
    for op, c in zip(wiring.graph.ops, _listed(op_classes), strict=True):
        for body, model in zip(op.graphs, leaders[c].graphs, strict=True):
            homes.update(zip(body.nested_values, model.nested_values, strict=True))
    return homes


def _renamed(op: Op, homes: Mapping[str, str]) -> Op:
    operands = _renamed_all(op.operands, homes)
    return op if operands == op.operands else replace(op, operands=operands)


def _renamed_all(operands: Sequence[Operand], homes: Mapping[str, str]) -> tuple[Operand, ...]:
    return tuple(homes[o] if isinstance(o, str) else o for o in operands)


def _variants(
    graph: Graph, op_classes: Ints, forms: Ints, homes: Mapping[str, str]
) -> tuple[tuple[Variant, ...], ...]:
    """For each class its ops by what they read, the first op's form first."""
    _, firsts, counts = np.unique(forms, return_index=True, return_counts=True)
    found: list[list[Variant]] = [[] for _ in range(int(op_classes.max(initial=-1)) + 1)]
    order = np.argsort(firsts)
    for first, count in zip(_listed(firsts[order]), _listed(counts[order]), strict=True):
        op = _renamed(graph.ops[first], homes)
        found[int(op_classes[first])].append(Variant(op, count, first))
    return tuple(map(tuple, found))


# -- a graph as arrays -----------------------------------------------------------------------------


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Wiring:
    """Nodes are the inputs, then the ops, then the outputs; values are what inputs and ops make.

    Arc k says that node `readers[k]` reads value `sources[k]` in place `slots[k]`, counted among
    what is no literal. A donated output also reads, in place 1, the input that it returns to.
    """

    graph: Graph
    names: tuple[str, ...]  # of the values
    makers: Ints  # [values] node
    places: Ints  # [values] which of its maker's results
    sources: Ints  # [arcs] value
    readers: Ints  # [arcs] node
    slots: Ints  # [arcs]

    @property
    def input_count(self) -> int:
        """Nodes below this are inputs."""
        return len(self.graph.inputs)

    @property
    def first_output(self) -> int:
        """Nodes from this on are outputs."""
        return len(self.graph.inputs) + len(self.graph.ops)


def wire(graph: Graph) -> Wiring:
    """The arrays of a graph; bodies of its ops are left out."""
    inputs, ops = graph.inputs, graph.ops
    names = [i.value.name for i in inputs]
    names += [r.name for op in ops for r in op.results]
    made = np.array([1] * len(inputs) + [len(op.results) for op in ops], dtype=np.int64)
    number = dict(zip(names, range(len(names)), strict=True))
    outputs = [(i, o) for i, o in enumerate(graph.outputs) if isinstance(o, str)]
    read = [[number[o] for o in op.operands if isinstance(o, str)] for op in ops]
    counts = np.array([len(r) for r in read], dtype=np.int64)
    start = len(inputs) + len(ops)
    returned = [number[inputs[i].value.name] for _, i in graph.donated]
    sources = [v for r in read for v in r] + [number[o] for _, o in outputs] + returned
    givers = [i for i, _ in outputs] + [o for o, _ in graph.donated]
    return Wiring(
        graph,
        tuple(names),
        np.repeat(np.arange(len(made)), made),
        _within(made),
        np.array(sources, dtype=np.int64),
        np.concatenate(
            [
                np.repeat(np.arange(len(inputs), start), counts),
                start + np.array(givers, dtype=np.int64),
            ]
        ),
        np.concatenate(
            [_within(counts), np.array([0] * len(outputs) + [1] * len(returned), dtype=np.int64)]
        ),
    )


def _within(counts: Ints) -> Ints:
    """0, 1, ... within each run of these lengths."""
    ends = np.cumsum(counts)
    within: Ints = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return within
