"""The forward pass for a layering: ops that run for each microbatch, and the cost of cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.batching import FREE, Batching, Moment, When
from autopar.ir.graph import Graph, Op
from autopar.ir.values import Role

Ints = npt.NDArray[np.int64]

_LOOP, _ONCE = Moment(When.LOOP, (0,)), Moment(When.ONCE, (0,))


@dataclass(frozen=True)
class Forward:
    """The forward ops that run for each microbatch, in order, by their number in the graph.

    What is made of nothing of the batch is not among them: it is computed once, or (`sources`,
    of any region) again for each microbatch, with as many rows. `flops[i]` is what op
    `positions[i]` costs; `crossing[i]` are the bytes of the loop's values, each counted once,
    that are made up to there and read by a later forward op.
    """

    graph: Graph
    moments: tuple[Moment, ...]
    sources: frozenset[int]
    positions: tuple[int, ...]
    flops: Ints
    crossing: Ints

    @property
    def ops(self) -> list[Op]:
        """The forward ops."""
        return [self.graph.ops[i] for i in self.positions]


def forward_of(batching: Batching) -> Forward:
    """The forward pass of a step."""
    graph, moments = batching.graph, _moments_of(batching)
    sources = _sources(graph, moments)
    positions = tuple(i for i in _forward_positions(graph, moments) if i not in sources)
    flops = np.array([graph.ops[i].flops for i in positions], dtype=np.int64)
    return Forward(graph, moments, sources, positions, flops, _crossing(graph, positions))


def _sources(graph: Graph, moments: tuple[Moment, ...]) -> frozenset[int]:
    """Ops of the loops that read nothing which differs between microbatches."""
    own = {i.value.name for i in graph.inputs if i.role is Role.BATCH}
    found: set[int] = set()
    for i, (op, moment) in enumerate(zip(graph.ops, moments, strict=True)):
        if moment.when is not When.LOOP:
            continue
        if own.isdisjoint(op.value_operands()):
            found.add(i)
        else:
            own.update(r.name for r in op.results)
    return frozenset(found)


def _forward_positions(graph: Graph, moments: tuple[Moment, ...]) -> list[int]:
    """Ops of the loops up to the first backward one, and later ones of the first loop alone.

    What only the backward pass reads may be left to a later loop: it is of the forward pass all
    the same. A second forward pass prepares in the first loop what it reads of the batch.
    """
    loops = [m.loops[0] if m.when is When.LOOP else -1 for m in moments]
    regions = [op.origin.region for op in graph.ops]
    looped = [(i, r) for i, (r, n) in enumerate(zip(regions, loops, strict=True)) if n >= 0]
    end = next((i for i, region in looped if region == "backward"), len(loops))
    first = _first_readers(graph, loops)
    return [
        i
        for i, region in looped
        if region == "forward" and (i < end or (loops[i] == 0 and first[i] == 0))
    ]


def _first_readers(graph: Graph, loops: list[int]) -> list[int]:
    """The first loop that reads each op, if only through others."""
    readers: dict[str, int] = {}
    first = list(loops)
    for i in reversed(range(len(loops))):
        read = [readers[r.name] for r in graph.ops[i].results if r.name in readers]
        first[i] = max(loops[i], min(read, default=0))
        for name in graph.ops[i].value_operands():
            readers[name] = min(readers.get(name, first[i]), first[i])
    return first


def _moments_of(batching: Batching) -> tuple[Moment, ...]:
    """The moment of each op; of a step left whole, the one it would have if it were cut.

    There ops that read the batch are in the loop, but for the update, which follows it.
    """
    if batching.moments:
        return batching.moments
    graph = batching.graph
    fresh = {i.value.name for i in graph.inputs if i.role is Role.BATCH}
    return tuple(_moment(op, fresh) for op in graph.ops)


def _moment(op: Op, fresh: set[str]) -> Moment:
    if fresh.isdisjoint(op.value_operands()):
        return FREE
    fresh.update(r.name for r in op.results)
    return _ONCE if op.origin.region == "update" else _LOOP


def _crossing(graph: Graph, positions: tuple[int, ...]) -> Ints:
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, i in enumerate(positions):
        for name in graph.ops[i].value_operands():
            if name in made:
                last[name] = at
        made.update((r.name, at) for r in graph.ops[i].results)
    # A value crosses all cuts from its maker to its last reader: differences, then one sum.
    steps = np.zeros(len(positions) + 1, dtype=np.int64)
    for name, end in last.items():
        nbytes = graph.values[name].nbytes
        steps[made[name]] += nbytes
        steps[end] -= nbytes
    return np.cumsum(steps)[: len(positions)].astype(np.int64)
