"""The sharding of every value and op of a step on one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.outcome import Outcome
from autopar.ir.sharding import Sharding

OpPath = tuple[int, ...]  # (op index) or, inside bodies, (op, body, op, ...)


@dataclass(frozen=True)
class ShardingPlan:
    """How everything lies on `mesh`.

    A value without an entry is made on demand where it is read. An op without an assignment
    computes in its result's sharding. `uses` tell where several ops of a region read a value in
    another sharding than its own: it is moved there once. `shared_partials` name the operands
    that are partial sums when an op's result is one.
    """

    mesh: MeshShape
    values: tuple[tuple[str, Sharding], ...]
    assignments: tuple[tuple[OpPath, Assignment], ...]
    uses: tuple[tuple[str, str, Sharding], ...]
    shared_partials: tuple[tuple[OpPath, tuple[int, ...]], ...]
    outcome: Outcome

    @cached_property
    def sharding_of(self) -> Mapping[str, Sharding]:
        """Value name -> sharding."""
        return dict(self.values)

    @cached_property
    def assignment_of(self) -> Mapping[OpPath, Assignment]:
        """Op path -> assignment."""
        return dict(self.assignments)

    @cached_property
    def use_of(self) -> Mapping[tuple[str, str], Sharding]:
        """(value name, region) -> the sharding in which the region's ops read it."""
        return {(name, region): s for name, region, s in self.uses}

    @cached_property
    def partials_of(self) -> Mapping[OpPath, tuple[int, ...]]:
        """Op path -> operands that are partial sums together."""
        return dict(self.shared_partials)

    def verify(self, graph: Graph) -> None:
        """Raise GraphError unless every sharding fits its value and is of this graph."""
        values = graph.nested_values
        for name, sharding in self.values:
            if name not in values:
                raise GraphError(f"the sharding names {name}, which graph {graph.name} has not")
            if not sharding.fits(values[name].shape, self.mesh):
                raise GraphError(f"{values[name]} cannot be sharded as {sharding} on ({self.mesh})")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"sharding on ({self.mesh}) {{  # {self.outcome}"
        for name, sharding in self.values:
            if not sharding.is_replicated:
                yield f"  {name}  {sharding}"
        for name, region, sharding in self.uses:
            yield f"  {name} read in {region} as {sharding}"
        yield "}"
