"""Mesh axes given to an op's factors, and what that means for its operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import GraphError
from autopar.ir.mesh import MeshShape
from autopar.ir.rule import Kind, Rule
from autopar.ir.sharding import Sharding


@dataclass(frozen=True)
class Assignment:
    """For each mesh axis the factor that it shards, or -1: the op repeats its work there."""

    factors: tuple[int, ...]

    def operand_sharding(self, rule: Rule, index: int, mesh: MeshShape) -> Sharding:
        """The sharding in which an operand is read."""
        return Sharding(self._dims(rule, rule.operands[index], mesh))

    def result_sharding(self, rule: Rule, index: int, mesh: MeshShape) -> Sharding:
        """The sharding of a result: partial over the axes of REDUCE factors."""
        partial = tuple(
            a
            for a, f in zip(mesh.names, self.factors, strict=True)
            if f >= 0 and rule.factors[f].kind is Kind.REDUCE
        )
        return Sharding(self._dims(rule, rule.results[index], mesh), partial)

    def combiner(self, rule: Rule) -> str:
        """The combiner of partial results; choices never mix combiners."""
        kinds = {
            rule.factors[f].combiner
            for f in self.factors
            if f >= 0 and rule.factors[f].kind is Kind.REDUCE
        }
        return min(kinds, default="sum")

    def _dims(
        self, rule: Rule, dims: Sequence[tuple[int, ...]], mesh: MeshShape
    ) -> tuple[tuple[str, ...], ...]:
        del rule
        return tuple(
            tuple(a for a, f in zip(mesh.names, self.factors, strict=True) if f in dim)
            for dim in dims
        )

    def share(self, mesh: MeshShape) -> int:
        """Over how many devices the op's work is divided."""
        return mesh.size([a for a, f in zip(mesh.names, self.factors, strict=True) if f >= 0])

    def text(self, mesh: MeshShape, rule: Rule) -> str:
        """The assignment in words: data->b, model->k(reduce)."""
        names = "abcdefghijklmnopqrstuvwxyz"
        parts = [
            f"{a}->{names[f % 26]}" + ("" if rule.factors[f].kind is Kind.PASS else "(reduce)")
            for a, f in zip(mesh.names, self.factors, strict=True)
            if f >= 0
        ]
        return ", ".join(parts) or "replicated"


def operand_of_result(
    rule: Rule, operand: int, result: Sharding, partial: bool, position: int = 0
) -> Sharding:
    """The sharding of an operand with which an op needs no communication for a result's.

    Follows the factors: axes on a result dim shard its major factor, and with it the operand's
    dim of which that factor is the major one.
    """
    held: dict[int, tuple[str, ...]] = {}
    for axes, dim in zip(result.dims, rule.results[position], strict=True):
        major = next((f for f in dim if rule.factors[f].size > 1), None)
        if axes and major is None:
            raise GraphError(f"a dim that nothing can shard is given axes {'+'.join(axes)}")
        if major is not None and axes:
            held[major] = axes
    dims = tuple(next((held[f] for f in dim if f in held), ()) for dim in rule.operands[operand])
    return Sharding(dims, result.partial if partial else ())
