"""Rules of primitives that move, repeat, regroup or join items without computing on them.

transpose    (a b) -> (b a)       every dim passes, at its new place
slice, pad   (a b) -> (a b')      b lies at other shards afterwards: permute
concatenate  (a b), (a c) -> ..   the joined dim must be whole
reshape      (ab) -> (a b)        both shapes are chains of common factors
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Literal, Value
from autopar.rules.primitive import (
    WHOLE,
    Factors,
    Fusion,
    Primitive,
    Work,
    optional,
    pairs,
    replicated_rule,
)


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


def _transpose(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    dims = found.each(operands[0].shape)
    return found.rule([dims], [[dims[d] for d in op.ints("permutation")]], [(0,)])


def _broadcast_in_dim(op: Op, operands: Sequence[Value]) -> Rule:
    """Dims that the operand has are shared; new ones, and 1 to n, are free."""
    found = Factors()
    shape = op.results[0].shape
    result = found.each(shape)
    mapped = [
        result[d] if n == shape[d] else WHOLE
        for n, d in zip(operands[0].shape, op.ints("broadcast_dimensions"), strict=True)
    ]
    rest: list[list[Dim]] = [[] for _ in operands[1:]]
    return found.rule([mapped, *rest], [result], [(0,)], on_demand=True)


def _created(op: Op, operands: Sequence[Value]) -> Rule:
    """Made of nothing, so in any sharding."""
    found = Factors()
    dims = [found.each(v.shape) for v in op.results]
    return found.rule([[WHOLE] * len(v.shape) for v in operands], dims, on_demand=True)


def _squeeze(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    dims = found.each(operands[0].shape)
    gone = {d % len(dims) for d in op.ints("dimensions")}
    return found.rule([dims], [[f for d, f in enumerate(dims) if d not in gone]], [(0,)])


def _rev(op: Op, operands: Sequence[Value]) -> Rule:
    """Shards of a reversed dim swap places."""
    found = Factors()
    turned = op.ints("dimensions")
    dims = [
        found.new(n, Kind.PERMUTE if d in turned else Kind.PASS)
        for d, n in enumerate(operands[0].shape)
    ]
    return found.rule([dims], [dims], [(0,)])


def _concatenate(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    axis = op.whole("dimension")
    dims = found.each(op.results[0].shape[:axis])
    tail = found.each(op.results[0].shape[axis + 1 :])

    def around(value: Value) -> list[Dim]:
        return [*dims, found.whole(value.shape[axis]), *tail]

    return found.rule(
        [around(v) for v in operands], [around(op.results[0])], [range(len(operands))]
    )


def _split(op: Op, operands: Sequence[Value]) -> Rule:
    """Pieces of a sharded dim would have to move to where they are wanted."""
    found = Factors()
    axis = op.whole("axis")
    dims = found.each(operands[0].shape)

    def cut(value: Value) -> list[Dim]:
        return [*dims[:axis], found.new(value.shape[axis], Kind.PERMUTE), *dims[axis + 1 :]]

    return found.rule([cut(operands[0])], [cut(v) for v in op.results], [(0,)])


def _stack(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    axis = op.whole("axis") % len(op.results[0].shape)
    dims = found.each(operands[0].shape)
    result = [*dims[:axis], found.whole(len(operands)), *dims[axis:]]
    return found.rule([dims] * len(operands), [result], [range(len(operands))])


def _unstack(op: Op, operands: Sequence[Value]) -> Rule:
    found = Factors()
    axis = op.whole("axis") % len(operands[0].shape)
    dims = found.each(op.results[0].shape)
    operand = [*dims[:axis], found.whole(operands[0].shape[axis]), *dims[axis:]]
    return found.rule([operand], [dims] * len(op.results), [(0,)])


def _tile(op: Op, operands: Sequence[Value]) -> Rule:
    """A repeated dim is (copies, items): whole copies may be shared out."""
    found = Factors()
    before = found.each(operands[0].shape)
    after = [
        dim if count == 1 else found.new(count) + dim
        for dim, count in zip(before, op.ints("reps"), strict=True)
    ]
    return found.rule([before], [after], [(0,)])


def _pad(op: Op, operands: Sequence[Value]) -> Rule:
    """Padded dims move items across shards; zeros keep partial sums partial."""
    found = Factors()
    before: list[Dim] = []
    after: list[Dim] = []
    for old, new, config in zip(
        operands[0].shape, op.results[0].shape, pairs(op.param("padding_config")), strict=True
    ):
        same = not any(config)
        kind = Kind.REPLICATE if config[2] else Kind.PERMUTE
        before.append(found.new(old) if same else found.new(old, kind))
        after.append(before[-1] if same else found.new(new, kind))
    padding = op.operands[1]
    zero = isinstance(padding, Literal) and padding.is_zero
    return found.rule([before, []], [after], [(0,)] if zero else ())


def _slice(op: Op, operands: Sequence[Value]) -> Rule:
    """Dims kept whole are shared; the others shift across shards."""
    found = Factors()
    before: list[Dim] = []
    after: list[Dim] = []
    for old, new in zip(operands[0].shape, op.results[0].shape, strict=True):
        before.append(found.new(old) if old == new else found.new(old, Kind.PERMUTE))
        after.append(before[-1] if old == new else found.new(new, Kind.PERMUTE))
    return found.rule([before], [after], [(0,)])


def _bitcast(op: Op, operands: Sequence[Value]) -> Rule:
    """Items of another width come and go with a last dim that must be whole."""
    found = Factors()
    old, new = operands[0], op.results[0]
    shared = found.each(old.shape[: min(len(old.shape), len(new.shape))])
    extra = [found.whole(n) for v in (old, new) for n in v.shape[len(shared) :]]
    longer = [*shared, *extra]
    return found.rule([longer[: len(old.shape)]], [longer[: len(new.shape)]])


# Index arithmetic in their readers' kernels, which gives back what it is given.
_MOVES = partial(Primitive, work=Work.NONE, fusion=Fusion.INDEXING, moves=True, keeps_zero=True)
_JOINS = partial(Primitive, work=Work.NONE, fusion=Fusion.INDEXING, regroups=True)

PRIMITIVES: Mapping[str, Primitive] = {
    "bitcast_convert_type": Primitive(_bitcast, Work.NONE),
    "broadcast_in_dim": Primitive(
        _broadcast_in_dim, Work.NONE, moves=True, keeps_zero=True, local=True
    ),
    "concatenate": _JOINS(_concatenate),
    "empty": Primitive(_created, local=True),
    "iota": Primitive(_created, Work.NONE, local=True),
    "iota_2x32_shape": Primitive(_created, local=True),
    "pad": _JOINS(_pad),
    "reshape": _MOVES(_reshape, local=True),
    "rev": _MOVES(_rev),
    "slice": _MOVES(_slice, picks=0, local=True),
    "split": _JOINS(_split),
    "squeeze": _MOVES(_squeeze),
    "stack": Primitive(_stack, moves=True, keeps_zero=True),
    "tile": Primitive(_tile, moves=True, keeps_zero=True, local=True),
    "transpose": _MOVES(_transpose),
    "unstack": Primitive(_unstack, moves=True, keeps_zero=True),
}
