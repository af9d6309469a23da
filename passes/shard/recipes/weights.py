"""Finds parameters and optimizer state among the arguments, and the ops that read a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.values import Role
from autopar.passes.shard.model.decisions import Place, Reading, ReadKind


@dataclass(frozen=True)
class Weights:
    """Decisions by what they are: all state, the parameters among it, and ops that read one.

    For each op that reads a weight, the factors that stand in the weight's dims.
    """

    state: frozenset[int]
    parameters: frozenset[int]
    readers: Mapping[int, frozenset[int]]


def find_weights(reading: Reading) -> Weights:
    """Parameters are state that forward or backward ops read; the rest is the optimizer's."""
    state: set[int] = set()
    for given in reading.graph.inputs:
        place = reading.standings[given.value.name]
        if given.role is not Role.BATCH and isinstance(place, Place):
            state.add(place.decision)
    through = _through_ports(reading, state)
    parameters: set[int] = set()
    readers: dict[int, frozenset[int]] = {}
    for read in reading.reads:
        if not isinstance(read.standing, Place):
            continue
        origin = through.get(read.standing.decision)
        if origin is None:
            continue
        if read.region != "update":
            parameters.add(origin)
        heavy = read.op is not None and read.op.kind in ("dot_general", "conv_general_dilated")
        if heavy and read.kind is ReadKind.OP and read.operand >= 0:
            assert read.op is not None
            assert read.op.rule is not None
            standing = {f for dim in read.op.rule.operands[read.operand] for f in dim}
            readers[read.reader] = readers.get(read.reader, frozenset()) | standing
    return Weights(frozenset(state), frozenset(parameters), readers)


def _through_ports(reading: Reading, state: set[int]) -> dict[int, int]:
    """State decisions, and the loop ports that pass state in, with the state they hold."""
    origin = {d: d for d in state}
    for read in reading.reads:
        if read.kind is ReadKind.EXACT and isinstance(read.standing, Place):
            source = origin.get(read.standing.decision)
            if source is not None and read.reader not in origin and read.region != "update":
                origin[read.reader] = source
    return origin
