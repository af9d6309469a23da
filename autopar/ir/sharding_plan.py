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


def phase_of(region: str, keeps: bool) -> str:
    """What a region is part of: forward and backward are one where moved values are kept."""
    return "forward" if keeps and region == "backward" else region


@dataclass(frozen=True)
class ShardingPlan:
    """How everything lies on `mesh`.

    A value without an entry is made on demand where it is read. An op without an assignment
    computes in its result's sharding. `uses` tell where several ops of a region read a value in
    another sharding than its own: it is moved there once. `shared_partials` name the operands
    that are partial sums when an op's result is one. A plan that `keeps` holds what it moved for
    the forward pass until the backward pass has read it too; others move it again.
    """

    mesh: MeshShape
    values: tuple[tuple[str, Sharding], ...]
    assignments: tuple[tuple[OpPath, Assignment], ...]
    uses: tuple[tuple[str, str, Sharding], ...]
    shared_partials: tuple[tuple[OpPath, tuple[int, ...]], ...]
    outcome: Outcome
    keeps: bool = False

    def phase_of(self, region: str) -> str:
        """The regions within which a value is moved once, by the name of the first."""
        return phase_of(region, self.keeps)

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
        """(value name, phase) -> the sharding in which the ops of a phase read it."""
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
