"""The ops of a step that hold no bodies, each with its graph and how often a step runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op
from autopar.ir.values import Value


@dataclass(frozen=True)
class Leaf:
    """An op, its operands and results as values, and its runs in a step."""

    op: Op
    operands: tuple[Value, ...]
    runs: int

    @property
    def nbytes(self) -> int:
        """Bytes that all runs read and make."""
        return self.runs * sum(v.nbytes for v in (*self.operands, *self.op.results))


def leaves_of(graph: Graph, runs: int = 1) -> Iterator[Leaf]:
    """The ops without bodies, in order; a while loop is taken to run once."""
    for op in graph.ops:
        if not op.graphs:
            yield Leaf(op, tuple(map(graph.value, op.operands)), runs * op.runs)
        trips = op.control_flow.trips if op.control_flow is not None else 1
        for body in op.graphs:
            yield from leaves_of(body, runs * trips)


def reading_line(graph: Graph, name: str) -> str:
    """The user's line that first reads a value, "" where none is known."""
    readers = (op for op in graph.ops if op.origin.line and name in op.value_operands())
    return next((op.origin.line for op in readers), "")


def making_line(graph: Graph, name: str) -> str:
    """The user's line that makes a value, "" where none is known."""
    makers = (op for op in graph.ops if any(v.name == name for v in op.results))
    return next((op.origin.line for op in makers), "")
