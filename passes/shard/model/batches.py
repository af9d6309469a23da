"""The dims of each value that carry the batch, followed from the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op
from autopar.ir.values import Role, Value
from autopar.rules.propagation import Part, Parts, factors_of, propagate


@dataclass(frozen=True)
class BatchTags:
    """The batch size, the argument it was read from, and where each value carries the batch."""

    size: int | None
    path: str
    parts: Mapping[str, Parts]

    def dims(self, name: str) -> Parts:
        """The dims of a value that carry the batch."""
        return self.parts.get(name, ())

    def factors(self, op: Op) -> Parts:
        """The factors of an op that carry the batch."""
        return () if op.rule is None else factors_of(op.rule, op, self.parts)


def tag_batch(graph: Graph) -> BatchTags:
    """Follow the first dim of the batch arguments through the graph.

    The batch size is the commonest leading dim among batch arguments, the first of equals;
    arguments with another one (a table, a key) carry none.
    """
    given = [i for i in graph.inputs if i.role is Role.BATCH and _may_carry(i.value)]
    sizes = [i.value.shape[0] for i in given]
    if not sizes:
        return BatchTags(None, "", {})
    size = max(sizes, key=lambda n: (sizes.count(n), -sizes.index(n)))
    carriers = [i for i in given if i.value.shape[0] == size]
    found = propagate(graph, {i.value.name: (Part(0, size),) for i in carriers})
    return BatchTags(size, carriers[0].path, found)


def _may_carry(value: Value) -> bool:
    return bool(value.shape) and not value.dtype.startswith("key")
