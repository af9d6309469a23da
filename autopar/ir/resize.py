"""Ops and values between two that differ in sizes alone: a step on another number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Op, Operand, Plain
from autopar.ir.values import Input, Literal, Value


@dataclass(frozen=True)
class Between:
    """Sizes `share` of the way from one graph to another that is like it but for sizes.

    Raises GraphError where the two differ in more, or where a size does not come out whole.
    """

    share: Fraction

    def op(self, low: Op, high: Op) -> Op:
        """An op with the sizes between two; its rule must be attached again."""
        if low.kind != high.kind:
            raise GraphError(f"{low.kind} of one graph is {high.kind} in the other")
        names = (name for name, _ in low.params)
        sizes = map(self._plain, (p for _, p in low.params), (p for _, p in high.params))
        return replace(
            low,
            operands=tuple(map(self._operand, low.operands, high.operands)),
            results=tuple(map(self.value, low.results, high.results)),
            params=tuple(zip(names, sizes, strict=True)),
            flops=round(low.flops + self.share * (high.flops - low.flops)),
            graphs=tuple(map(self._body, low.graphs, high.graphs)),
        )

    def value(self, low: Value, high: Value) -> Value:
        """A value with the sizes between two."""
        return low if low == high else replace(low, shape=self._shape(low.shape, high.shape))

    def _body(self, low: Graph, high: Graph) -> Graph:
        if len(low.ops) != len(high.ops) or len(low.inputs) != len(high.inputs):
            raise GraphError(f"graphs {low.name} and {high.name} differ in more than sizes")
        return replace(
            low,
            inputs=tuple(map(self._input, low.inputs, high.inputs)),
            ops=tuple(map(self.op, low.ops, high.ops)),
            outputs=tuple(map(self._operand, low.outputs, high.outputs)),
        )

    def _input(self, low: Input, high: Input) -> Input:
        return replace(low, value=self.value(low.value, high.value))

    def _operand(self, low: Operand, high: Operand) -> Operand:
        if isinstance(low, Literal) and isinstance(high, Literal):
            return replace(low, shape=self._shape(low.shape, high.shape))
        return low

    def _shape(self, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._size, low, high))

    def _plain(self, low: Plain, high: Plain) -> Plain:
        if isinstance(low, tuple) and isinstance(high, tuple) and len(low) == len(high):
            return tuple(map(self._plain, low, high))
        if isinstance(low, int) and isinstance(high, int) and not isinstance(low, bool):
            return self._size(low, high)
        return low

    def _size(self, low: int, high: int) -> int:
        if low == high:
            return low
        size = low + self.share * (high - low)
        if size.denominator != 1:
            raise GraphError(f"a size between {low} and {high} is {size}, which is not whole")
        return int(size)
