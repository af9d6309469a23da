"""In which order the dims of a value lie in memory, and which values are laid out anew.

Only batched products fix an order, as attention's do: the results of all else lie as their readers
wish. Element-wise work wants its operands to lie alike, and a product wants the dims that it sums
over, and those that it keeps, side by side; what does not is written out in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Op
from autopar.ir.rule import Rule

# What the two operands of a product are written out as, where they have to be.
_ORDERS = ("sums last", "sums first")


@dataclass(frozen=True, slots=True)
class _Order:
    """Dims longer than one, the slowest first, and how late the product is that they come from."""

    dims: tuple[int, ...]
    product: int


class Layouts:
    """Follows the orders of values through a block."""

    def __init__(self) -> None:
        self._orders: dict[str, _Order] = {}
        self._products = 0

    @property
    def any(self) -> bool:
        """True if an order is fixed."""
        return bool(self._orders)

    def product(self, op: Op, operands: Sequence[str | None], made: str) -> Mapping[str, str]:
        """Operands that a product wants in another order, with names for them in that order.

        Notes how the result of a batched product lies.
        """
        rule = op.rule
        if rule is None:
            return {}
        left, right = (_long_factors(rule, dims) for dims in rule.operands[:2])
        kept = _long_factors(rule, rule.results[0])
        batch = left & right & kept
        if batch:
            self._products += 1
            dims = tuple(d for d, size in enumerate(op.results[0].shape) if size > 1)
            self._orders[made] = _Order(dims, self._products)
        given = [(k, name) for k, name in enumerate(operands) if name in self._orders and name]
        return {
            name: f"{name} {_ORDERS[k]}"
            for k, name in given
            if not _suits(self._orders[name], rule, k, batch, kept)
        }

    def element_wise(self, op: Op, operands: Sequence[str | None], made: str) -> str | None:
        """The operand that is written out because it lies otherwise; notes how the result lies.

        That of the latest product gives way to that of the earliest.
        """
        rule, orders = op.rule, self._orders
        given = [(k, name) for k, name in enumerate(operands) if name in orders and name]
        if rule is None or not given:
            return None
        known = [(_carried(orders[name], rule, k), name) for k, name in given]
        lies = [(order, name) for order, name in known if order is not None]
        if not lies:
            return None
        first = min(lies, key=lambda found: found[0].product)[0]
        last, name = max(lies, key=lambda found: found[0].product)
        orders[made] = first
        if first.dims == last.dims:
            return None
        del orders[name]
        return name


def _long_factors(rule: Rule, dims: Sequence[Sequence[int]]) -> set[int]:
    return {f for dim in dims for f in dim if rule.factors[f].size > 1}


def _suits(order: _Order, rule: Rule, operand: int, batch: set[int], kept: set[int]) -> bool:
    """True if batch dims come first, and the others in two runs of rising dims."""
    sides = list[tuple[int, int]]()
    for d in order.dims:
        factors = {f for f in rule.operands[operand][d] if rule.factors[f].size > 1}
        sides.append((0 if factors <= batch else 1 if factors <= kept else 2, d))
    inner = [pair for pair in sides if pair[0]]
    pairs = list(itertools.pairwise(inner))
    turns = sum(a[0] != b[0] for a, b in pairs)
    rising = all(a[1] < b[1] for a, b in pairs if a[0] == b[0])
    return sides[len(sides) - len(inner) :] == inner and turns <= 1 and rising


def _carried(order: _Order, rule: Rule, operand: int) -> _Order | None:
    """The order of a result that is computed in the order of an operand."""
    place = {f: d for d, dim in enumerate(rule.results[0]) for f in dim}
    dims: list[int] = []
    for d in order.dims:
        found = {place.get(f, -1) for f in rule.operands[operand][d] if rule.factors[f].size > 1}
        if len(found) != 1 or -1 in found or found & set(dims):
            return None
        dims += found
    return _Order(tuple(dims), order.product)
