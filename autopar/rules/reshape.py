"""The rule of reshape: both shapes as chains of common factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Rule
from autopar.ir.values import Value
from autopar.rules.factors import Factors, replicated_rule
from autopar.rules.params import optional
from autopar.rules.primitive import Fusion, Primitive, Work


class _Side:
    """A shape being walked from the left, its dims filling up with factors."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape
        self._at = 0
        self.dims: list[Dim] = [() for _ in shape]
        self.passed = 1  # items to the left of where we stand
        self.rest = shape[0] if shape else 1  # what is left of the dim we stand in
        self._step()

    def take(self, size: int, factor: Dim) -> None:
        """Put a factor of this size into the dim, then go on to where something is left."""
        self.dims[self._at] += factor
        self.passed *= size
        self.rest //= size
        self._step()

    def _step(self) -> None:
        while self.rest == 1 and self._at + 1 < len(self._shape):
            self._at += 1
            self.rest = self._shape[self._at]


def gcd_chain(
    before: Sequence[int], after: Sequence[int], found: Factors
) -> tuple[list[Dim], list[Dim]]:
    """The dims of both sides of a reshape as factors, major to minor.

    Walk both shapes from the left. While as many items lie to the left on both sides, the next
    factor is shared: the gcd of what is left of the two dims. Where that is 1, each side splits
    off factors of its own until the products meet again: 6x4 to 4x6 is (ab)(de) to (ac)(fe)
    with a=2, b=3, c=2, d=2, f=3, e=2. No zero sizes.
    """
    left, right = _Side(before), _Side(after)
    while left.rest > 1 or right.rest > 1:
        if left.passed == right.passed:
            common = math.gcd(left.rest, right.rest)
            if common > 1:
                shared = found.new(common)
                left.take(common, shared)
                right.take(common, shared)
                continue
            left.take(left.rest, found.whole(left.rest))
            right.take(right.rest, found.whole(right.rest))
            continue
        behind = left if left.passed < right.passed else right
        wanted = math.lcm(left.passed, right.passed) // behind.passed
        size = wanted if behind.rest % wanted == 0 else behind.rest
        behind.take(size, found.whole(size))
    return left.dims, right.dims


def reading_order(op: Op, rank: int) -> tuple[int, ...]:
    """The dims of a reshape's operand from major to minor, as its items are read.

    `lax.reshape(x, sizes, dimensions)` turns the dims first; without `dimensions` they stand.
    """
    return tuple(range(rank)) if optional(op, "dimensions") is None else op.ints("dimensions")


def _reshape(op: Op, operands: Sequence[Value]) -> Rule:
    shape = operands[0].shape
    if not operands[0].item_count:
        return replicated_rule(op, operands)
    found = Factors()
    order = reading_order(op, len(shape))
    turned, after = gcd_chain([shape[d] for d in order], op.results[0].shape, found)
    before = [turned[order.index(d)] for d in range(len(shape))]
    return found.rule([before], [after], [(0,)])


PRIMITIVES: Mapping[str, Primitive] = {
    "reshape": Primitive(
        _reshape, Work.NONE, Fusion.INDEXING, moves=True, keeps_zero=True, local=True
    )
}
