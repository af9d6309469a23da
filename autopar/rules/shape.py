"""Rules of primitives that move, repeat or join items without computing on them.

transpose    (a b) -> (b a)       every dim passes, at its new place
slice, pad   (a b) -> (a b')      b lies at other shards afterwards: permute
concatenate  (a b), (a c) -> ..   the joined dim must be whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Literal, Value
from autopar.rules.factors import WHOLE, Factors
from autopar.rules.params import pairs
from autopar.rules.primitive import Fusion, Primitive, Work


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
_JOINS = partial(Primitive, work=Work.NONE, fusion=Fusion.INDEXING)

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
    "rev": _MOVES(_rev),
    "slice": _MOVES(_slice, picks=0, local=True),
    "split": _JOINS(_split),
    "squeeze": _MOVES(_squeeze),
    "stack": Primitive(_stack, moves=True, keeps_zero=True),
    "tile": Primitive(_tile, moves=True, keeps_zero=True, local=True),
    "transpose": _MOVES(_transpose),
    "unstack": Primitive(_unstack, moves=True, keeps_zero=True),
}
