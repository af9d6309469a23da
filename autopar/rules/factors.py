"""The factors of one rule, numbered as they are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Factor, Kind, Rule
from autopar.ir.values import Value

RuleMaker = Callable[[Op, Sequence[Value]], Rule]

WHOLE: Dim = ()  # a dim that nothing can shard


class Factors:
    """Collects the factors of one op; a maker asks for them dim by dim, then for the rule."""

    def __init__(self) -> None:
        self._found: list[Factor] = []

    def new(self, size: int, kind: Kind = Kind.PASS, combiner: str = "sum") -> Dim:
        """A dim of one new factor."""
        self._found.append(Factor(size, kind, combiner))
        return (len(self._found) - 1,)

    def each(self, shape: Sequence[int], kind: Kind = Kind.PASS) -> list[Dim]:
        """A new factor for each dim of a shape."""
        return [self.new(n, kind) for n in shape]

    def whole(self, size: int) -> Dim:
        """A dim of one new factor that must be whole before the op."""
        return self.new(size, Kind.REPLICATE)

    def rule(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        linear: Sequence[Sequence[int]] = (),
        *,
        on_demand: bool = False,
    ) -> Rule:
        """The rule over all factors found so far."""
        return Rule(
            tuple(self._found),
            tuple(tuple(dims) for dims in operands),
            tuple(tuple(dims) for dims in results),
            tuple(tuple(group) for group in linear),
            on_demand,
        )


def replicated_rule(op: Op, operands: Sequence[Value]) -> Rule:
    """The rule that keeps every dim of every operand and result whole."""
    found = Factors()
    return found.rule(
        [found.each(v.shape, Kind.REPLICATE) for v in operands],
        [found.each(v.shape, Kind.REPLICATE) for v in op.results],
    )


def unknown_rule(op: Op, operands: Sequence[Value]) -> Rule:
    """The rule of a primitive that we know nothing about: nothing can be sharded."""
    return Rule(
        (),
        tuple((WHOLE,) * len(v.shape) for v in operands),
        tuple((WHOLE,) * len(v.shape) for v in op.results),
        known=False,
    )
