"""Reads the user's own with_sharding_constraint: a group whose sharding is fixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.graph import Graph, Op
from autopar.passes.shard.model.decisions import DecisionKind, OpPath
from autopar.passes.shard.model.follow import spec

if TYPE_CHECKING:
    from autopar.passes.shard.model.read import Reader


def is_constraint(op: Op) -> bool:
    """True if an op constrains its value's sharding."""
    return op.kind == "sharding_constraint" and any(k == "spec" for k, _ in op.params)


def read_constraint(reader: Reader, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
    """A group of the constrained value, which follows nothing."""
    result = op.results[0]
    index = reader.add_group(
        DecisionKind.GROUP, result, "with_sharding_constraint", runs, op.origin.region,
        op.origin.line,
    )  # fmt: skip
    decision = reader.decisions[index]
    decision.members[0] = decision.members[0]._replace(path=path)
    decision.depth = reader.depth(op)
    decision.fixed = spec(op)
    reader.followers[path] = index
    reader.read_operands(graph, op, path, index, tuple(range(len(result.shape))), runs)
