"""Megatron's blocks: the decisions inside each, and those between them.

A product of the stream with a weight opens a block and is split by the weight's columns; a product
of something inside with a weight closes it and is split by rows. Backward it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Op
from autopar.passes.shard.model.decisions import (
    Decision,
    DecisionKind,
    Place,
    Reading,
    ReadKind,
    Rematerializable,
    Standing,
)
from autopar.passes.shard.recipes.spread import Slot, shared_factors, spread
from autopar.passes.shard.recipes.view import View


@dataclass(frozen=True)
class Blocks:
    """Positions of decisions between blocks; features that the last axis splits in products.

    `seeds` are the products with a weight and the factor of each that is the sequence.
    """

    seeds: tuple[Slot, ...]
    positions: Mapping[int, frozenset[int]]
    features: Mapping[int, frozenset[int]]


def find_blocks(reading: Reading, view: View) -> Blocks:
    """The blocks of a step, in the order in which its decisions are made."""
    seeds = tuple(
        (index, factor)
        for index in sorted(view.weights.readers)
        if (factor := _sequence(reading, view, index)) is not None
    )
    slots = spread(reading, seeds)
    sources = _sources(reading)
    inside: set[int] = set()
    positions: dict[int, frozenset[int]] = {}
    features: dict[int, frozenset[int]] = {}
    for index, decision in enumerate(reading.decisions):
        entered = any(s in inside for s in sources.get(index, ()) if s < index)
        if index in view.weights.readers:
            assert decision.op is not None
            features[index] = _features(decision.op, view.weights.readers[index], entered)
            entered = not entered
        if entered:
            inside.add(index)
        elif index in slots and _follows(decision, sources.get(index, ()), positions):
            positions[index] = slots[index] - {view.factor(index)}
    return Blocks(seeds, positions, features)


def _follows(decision: Decision, sources: Sequence[int], stream: Mapping[int, object]) -> bool:
    """True if a decision is part of the stream: groups of numbers, and ops on nothing else."""
    if decision.op is not None:
        return bool(sources) and all(s in stream for s in sources)
    assert decision.value is not None
    return decision.kind is not DecisionKind.INPUT and decision.value.is_floating


def _sources(reading: Reading) -> dict[int, list[int]]:
    """The decisions that feed each decision."""
    found: dict[int, list[int]] = {}
    for read in reading.reads:
        for home in _homes(read.standing):
            made = read.kind is ReadKind.OP and read.operand < 0
            target, source = (home, read.reader) if made else (read.reader, home)
            found.setdefault(target, []).append(source)
    return found


def _homes(standing: Standing) -> Iterator[int]:
    if isinstance(standing, Place):
        yield standing.decision
    elif isinstance(standing, Rematerializable):
        for inner in standing.operands:
            yield from _homes(inner)


def _features(op: Op, weight: frozenset[int], rows: bool) -> frozenset[int]:
    """The factors of a weight that are summed over (its rows), or that are left (its columns)."""
    assert op.rule is not None
    left = {f for dim in op.rule.results[0] for f in dim}
    return frozenset(f for f in weight if (f not in left) == rows)


def _sequence(reading: Reading, view: View, index: int) -> int | None:
    """The first factor of a product that is neither the batch nor in its weight."""
    op = reading.decisions[index].op
    assert op is not None
    assert op.rule is not None
    if op.kind != "dot_general":
        return None
    batch, weight = view.factor(index), view.weights.readers[index]
    if shared_factors(op) & weight:
        return None  # a weight for each expert: what else is there are its slots
    for dim in op.rule.results[0]:
        factor = op.rule.major(dim)
        if factor is not None and factor != batch and factor not in weight:
            return factor
    return None
