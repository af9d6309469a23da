"""When each value is held: from the op that makes it to the last that reads it, over the step."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Graph
from autopar.ir.values import Value
from autopar.passes.shard.decisions import (
    Demand,
    Place,
    Reading,
    ReadKind,
    Standing,
)


def materialized(reading: Reading) -> frozenset[str]:
    """Values that are written to memory: inputs, outputs, and what is not fused away.

    A value that element-wise work makes and only element-wise work of the same region reads is
    fused by every XLA back end.
    """
    kept = {i.value.name for i in reading.graph.inputs}
    kept.update(o for o, target in reading.outputs if isinstance(o, str) and target is None)
    fusible = _fusible(reading)
    for read in reading.reads:
        region = read.region if read.kind is ReadKind.GROUP else None
        for name in _sources(read.standing, read.value):
            if region is None or fusible.get(name) != region:
                kept.add(name)
    return frozenset(kept)


def _fusible(reading: Reading) -> dict[str, str]:
    """Values that element-wise ops make, with the ops' regions."""
    found: dict[str, str] = {}
    for path in reading.followers:
        op = reading.graph.op_at(path)
        found.update((r.name, op.origin.region) for r in op.results)
    return found


def _sources(standing: Standing, value: Value) -> Iterator[str]:
    if isinstance(standing, Place):
        yield value.name
    elif isinstance(standing, Demand):
        for inner, held in zip(standing.operands, standing.operand_values, strict=True):
            yield from _sources(inner, held)


def lifetimes(reading: Reading, kept: frozenset[str]) -> Iterator[tuple[Value, Place, int, int]]:
    """(value, place, first, last) of everything held; inputs are held over the whole step.

    Outputs that return to a donated input reuse its buffer and are not counted again.
    """
    clock = _Clock(reading)
    clock.visit(reading.graph)
    horizon = clock.now
    inputs = {i.value.name for i in reading.graph.inputs}
    returned = {o for o, target in reading.outputs if target is not None}
    outputs = {o for o, _ in reading.outputs}
    for name, value in reading.values.items():
        standing = reading.standings.get(name)
        if name not in kept or not isinstance(standing, Place) or name in returned - inputs:
            continue
        if name in inputs:
            yield value, standing, 0, horizon
        elif name in clock.made:
            last = horizon if name in outputs else clock.read.get(name, clock.made[name])
            yield value, standing, clock.made[name], max(last, clock.made[name])


class _Clock:
    """Numbers the ops of a nest in order; a loop makes its results before its body runs."""

    def __init__(self, reading: Reading) -> None:
        self.now = 0
        self.made: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self._standings = reading.standings

    def visit(self, graph: Graph) -> None:
        """Count through a graph and the bodies in it."""
        for op in graph.ops:
            self.now += 1
            start = self.now
            for body in op.graphs:
                self.visit(body)
            for value in op.results:
                self.made[value.name] = start
            for operand in op.value_operands():
                self._touch(operand, self.now)

    def _touch(self, name: str, when: int) -> None:
        self.read[name] = max(when, self.read.get(name, 0))
        standing = self._standings.get(name)
        if isinstance(standing, Demand):
            for held, inner in zip(standing.operand_values, standing.operands, strict=True):
                if inner is not None:
                    self._touch(held.name, when)
