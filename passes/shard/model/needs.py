"""The shardings that a reader's choice needs, through ops that are made where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.assignment import Assignment, operand_of_result
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding
from autopar.ir.values import Value
from autopar.passes.shard.model.decisions import Place, Read, ReadKind, Rematerializable, Standing

Choice = Sharding | Assignment


def required(read: Read, choices: Sequence[Choice], mesh: MeshShape) -> tuple[Sharding, ...]:
    """For each choice of the reader, the sharding in which it reads the value."""
    return tuple(_required(read, choice, mesh) for choice in choices)


def _required(read: Read, choice: Choice, mesh: MeshShape) -> Sharding:
    if isinstance(choice, Assignment):
        assert read.op is not None
        assert read.op.rule is not None
        return choice.operand_sharding(read.op.rule, read.operand, mesh)
    if read.kind is ReadKind.EXACT:
        return Place(read.reader, read.dims).sharding(choice)
    assert read.op is not None
    assert read.op.rule is not None
    result = Place(read.reader, read.dims).sharding(choice)
    return operand_of_result(read.op.rule, read.operand, result, read.partial_ok)


def sources(
    standing: Standing, value: Value, wanted: Sequence[Sharding]
) -> Iterator[tuple[Value, Place, tuple[Sharding, ...]]]:
    """The placed values that a need comes down to, and the shardings asked of each.

    A value made on demand asks its own operands for what its sharding implies; a partial sum
    of it is made by masking, so its operands are asked for no partial sums.
    """
    if isinstance(standing, Place):
        yield value, standing, tuple(wanted)
    elif isinstance(standing, Rematerializable):
        rule = standing.op.rule
        assert rule is not None
        for i, inner in enumerate(standing.operands):
            if inner is not None:
                asked = tuple(operand_of_result(rule, i, s, False) for s in wanted)
                yield from sources(inner, standing.operand_values[i], asked)
