"""Rules of contractions: batch, free and contracted factors.

dot_general           (b m k), (b k n) -> (b m n)      b, m, n pass: each shard is computed alone
                                                       k is reduced: shards are partial sums
ragged_dot_general    (m k), (g k n), (g) -> (m n)     the rows m come in groups g: both whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op, Plain
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import Factors, Fusion, Primitive, Work, fields, ints, items, pairs


def _numbers(value: Plain) -> tuple[tuple[int, ...], ...]:
    """Contracted dims of left and right, then batch dims of left and right."""
    contracted, batch = items(value)
    return (*pairs(contracted), *pairs(batch))


def _dot_general(op: Op, operands: Sequence[Value]) -> Rule:
    """b, m, n pass; k leaves a partial sum. Results are ordered b, m, n."""
    left, right = (v.shape for v in operands)
    left_k, right_k, left_b, right_b = _numbers(op.param("dimension_numbers"))
    found = Factors()
    # A product of Booleans is an "or" of "and"s, which no sum over shards puts together.
    k_kind = Kind.REPLICATE if op.results[0].dtype == "bool" else Kind.REDUCE
    batch = [found.new(left[d]) for d in left_b]
    left_free = {d: found.new(n) for d, n in enumerate(left) if d not in left_b + left_k}
    right_free = {d: found.new(n) for d, n in enumerate(right) if d not in right_b + right_k}
    shared = [found.new(left[d], k_kind) for d in left_k]
    return found.rule(
        [
            _placed(left_free, (left_b, batch), (left_k, shared)),
            _placed(right_free, (right_b, batch), (right_k, shared)),
        ],
        [[*batch, *left_free.values(), *right_free.values()]],
        [(0,), (1,)],
    )


def _placed(free: dict[int, Dim], *groups: tuple[Sequence[int], list[Dim]]) -> list[Dim]:
    """Dims by position, free ones and grouped ones together."""
    by_position = dict(free)
    for positions, dims in groups:
        by_position.update(zip(positions, dims, strict=True))
    return [by_position[d] for d in sorted(by_position)]


def _ragged_dot_general(op: Op, operands: Sequence[Value]) -> Rule:
    """As dot_general, but the ragged dim, the groups and their sizes must be whole.

    Group sizes of their own for each batch row tie all the left dims to them: those stay whole.
    """
    numbers = fields(op.param("ragged_dot_dimension_numbers"))
    left_k, right_k, left_b, right_b = _numbers(numbers["dot_dimension_numbers"])
    ragged, groups = ints(numbers["lhs_ragged_dimensions"]), ints(numbers["rhs_group_dimensions"])
    left, right, sizes = (v.shape for v in operands[:3])
    found = Factors()

    def left_kind(d: int, kind: Kind) -> Kind:
        return Kind.REPLICATE if d in ragged or (len(sizes) > 1 and kind is Kind.PASS) else kind

    batch = [found.new(left[d], left_kind(d, Kind.PASS)) for d in left_b]
    left_free = {
        d: found.new(n, left_kind(d, Kind.PASS))
        for d, n in enumerate(left)
        if d not in left_b + left_k
    }
    right_free = {
        d: found.new(n) for d, n in enumerate(right) if d not in right_b + right_k + groups
    }
    k_kind = Kind.REPLICATE if len(sizes) > 1 else Kind.REDUCE
    shared = [found.new(left[d], left_kind(d, k_kind)) for d in left_k]
    group = found.whole(operands[2].shape[-1])
    by_group = (groups, [group] * len(groups))
    group_result = [group] if set(ragged) <= set(left_k) else []
    return found.rule(
        [
            _placed(left_free, (left_b, batch), (left_k, shared)),
            _placed(right_free, (right_b, batch), (right_k, shared), by_group),
            [*(found.whole(n) for n in sizes[:-1]), group],
            *([] for _ in operands[3:]),
        ],
        [[*group_result, *batch, *left_free.values(), *right_free.values()]],
        [(0,), (1,)],
    )


def _dot_terms(op: Op, operands: Sequence[Value]) -> int:
    """b m k n: each item of the left meets each free item of the right."""
    _, right_k, _, right_b = _numbers(op.param("dimension_numbers"))
    return _met(operands, right_k + right_b)


def _ragged_dot_terms(op: Op, operands: Sequence[Value]) -> int:
    """The same: an item of the left meets those of its own group alone."""
    numbers = fields(op.param("ragged_dot_dimension_numbers"))
    _, right_k, _, right_b = _numbers(numbers["dot_dimension_numbers"])
    return _met(operands, right_k + right_b + ints(numbers["rhs_group_dimensions"]))


def _met(operands: Sequence[Value], bound: Sequence[int]) -> int:
    left, right = operands[:2]
    return left.item_count * math.prod(n for d, n in enumerate(right.shape) if d not in bound)


PRIMITIVES: Mapping[str, Primitive] = {
    "dot_general": Primitive(_dot_general, Work.TERMS, Fusion.PRODUCT, terms=_dot_terms),
    "ragged_dot_general": Primitive(_ragged_dot_general, Work.TERMS, terms=_ragged_dot_terms),
}
