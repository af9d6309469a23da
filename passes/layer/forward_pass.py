"""The forward pass for a layering: ops that run for each microbatch, and the cost of cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.batching import Batching, Moment, When, moments_of_one
from autopar.ir.graph import Graph, Op
from autopar.ir.values import Role

Ints = npt.NDArray[np.int64]


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
    graph = batching.graph
    rows = {i.value.name for i in graph.inputs if i.role is Role.BATCH}
    # 1. The moment of each op. A step that is left whole has those of one microbatch.
    moments = batching.moments or moments_of_one(graph)
    # 2. Sources: ops of the loops that read nothing which differs between microbatches.
    own, sources = set(rows), set[int]()
    for i, (op, moment) in enumerate(zip(graph.ops, moments, strict=True)):
        if moment.when is not When.LOOP:
            continue
        if own.isdisjoint(op.value_operands):
            sources.add(i)
        else:
            own.update(r.name for r in op.results)
    # 3. The forward ops without them.
    positions = tuple(i for i in _forward_positions(graph, moments) if i not in sources)
    flops = np.array([graph.ops[i].flops for i in positions], dtype=np.int64)
    # 4. A value crosses all cuts from its maker to its last reader:
    #
    #        x = ..    y = f(x)    z = g(x, y)       bytes of x and y after their makers,
    #        + x       + y         - x - y           less both at the last reader, summed up
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, i in enumerate(positions):
        for name in graph.ops[i].value_operands:
            if name in made:
                last[name] = at
        made.update((r.name, at) for r in graph.ops[i].results)
    steps = np.zeros(len(positions) + 1, dtype=np.int64)
    for name, end in last.items():
        nbytes = graph.values[name].nbytes
        steps[made[name]] += nbytes
        steps[end] -= nbytes
    crossing = np.cumsum(steps)[: len(positions)].astype(np.int64)
    return Forward(graph, moments, frozenset(sources), positions, flops, crossing)


def _forward_positions(graph: Graph, moments: Sequence[Moment]) -> list[int]:
    """Ops of the loops up to the first backward one, and later ones of the first loop alone.

    What only the backward pass reads may be left to a later loop: it is of the forward pass all
    the same. A second forward pass prepares in the first loop what it reads of the batch.
    """
    loops = [m.loops[0] if m.when is When.LOOP else -1 for m in moments]
    # The first loop that reads each op, if only through others.
    readers: dict[str, int] = {}
    first = list(loops)
    for i in reversed(range(len(loops))):
        read = [readers[r.name] for r in graph.ops[i].results if r.name in readers]
        first[i] = max(loops[i], min(read, default=0))
        for name in graph.ops[i].value_operands:
            readers[name] = min(readers.get(name, first[i]), first[i])
    regions = [op.origin.region for op in graph.ops]
    looped = [(i, r) for i, (r, n) in enumerate(zip(regions, loops, strict=True)) if n >= 0]
    end = next((i for i, region in looped if region == "backward"), len(loops))
    return [
        i
        for i, region in looped
        if region == "forward" and (i < end or (loops[i] == 0 and first[i] == 0))
    ]
