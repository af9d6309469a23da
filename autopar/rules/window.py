"""Rules of convolutions and other primitives that slide a window.

conv    (n c y), (o c t) -> (n o y')    n, o pass; c is reduced
                                        y needs its neighbors' edges: permute; t taps, whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import (
    Factors,
    Fusion,
    Primitive,
    Work,
    alike,
    fields,
    ints,
    optional,
    pairs,
)


def _conv_general_dilated(op: Op, operands: Sequence[Value]) -> Rule:
    """n, o pass; c leaves a partial sum; groups pass, as major part of two features or a batch.

    Feature groups: (g c) and (g o) c to (g o). Batch groups: (g n) and (g o) to n, (g o).
    """
    left, right = (v.shape for v in operands)
    numbers = fields(op.param("dimension_numbers"))
    left_at, right_at, out_at = (ints(numbers[k]) for k in ("lhs_spec", "rhs_spec", "out_spec"))
    found = Factors()
    feature_groups, batch_groups = op.whole("feature_group_count"), op.whole("batch_group_count")
    groups = found.new(feature_groups * batch_groups)
    batch = found.new(left[left_at[0]] // batch_groups)
    outs = found.new(right[right_at[0]] // (feature_groups * batch_groups))
    ins = found.new(right[right_at[1]], Kind.REDUCE)
    left_dims = {
        left_at[0]: groups + batch if batch_groups > 1 else batch,
        left_at[1]: groups + ins if feature_groups > 1 else ins,
    }
    grouped = feature_groups * batch_groups > 1
    right_dims = {right_at[0]: groups + outs if grouped else outs, right_at[1]: ins}
    out_dims = {out_at[0]: batch, out_at[1]: right_dims[right_at[0]]}
    out = op.results[0].shape
    for space in range(len(left) - 2):
        at = (left_at[space + 2], right_at[space + 2], out_at[space + 2])
        taps = right[at[1]]
        # A window of one tap that visits every row once, in order, needs no neighbors.
        still = (
            op.ints("window_strides")[space] == 1
            and op.ints("lhs_dilation")[space] == 1
            and pairs(op.param("padding"))[space] == (0, 0)
        )
        slides = taps > 1 or not still
        left_dims[at[0]], out_dims[at[2]] = _slid(found, left[at[0]], out[at[2]], slides=slides)
        right_dims[at[1]] = found.whole(taps)
    return found.rule(
        [_in_order(left_dims), _in_order(right_dims)], [_in_order(out_dims)], [(0,), (1,)]
    )


def _conv_terms(op: Op, operands: Sequence[Value]) -> int:
    """For each item that it makes, the taps of one feature that do not fall between its inputs.

    Where inputs lie apart, as for the input's gradient of a convolution with strides, no compiler
    multiplies the zeros between them.
    """
    taps = operands[1].shape
    features = taps[ints(fields(op.param("dimension_numbers"))["rhs_spec"])[0]]
    apart = math.prod(op.ints("lhs_dilation"))
    return op.results[0].item_count * math.prod(taps) // max(features * apart, 1)


def _in_order(dims: Mapping[int, Dim]) -> list[Dim]:
    return [dims[d] for d in sorted(dims)]


def _slid(found: Factors, old: int, new: int, *, slides: bool) -> tuple[Dim, Dim]:
    """A dim before and after a window slid over it: shards need their neighbors' edges."""
    if not slides:
        shared = found.new(old)
        return shared, shared
    before = found.new(old, Kind.PERMUTE)
    return before, before if old == new else found.new(new, Kind.PERMUTE)


def _trivial(op: Op, dim: int) -> bool:
    """True if the window of this dim is a single row that visits each row once."""
    dilation = optional(op, "base_dilation")
    return (
        op.ints("window_dimensions")[dim] == 1
        and op.ints("window_strides")[dim] == 1
        and pairs(op.param("padding"))[dim] == (0, 0)
        and (dilation is None or ints(dilation)[dim] == 1)
    )


def _windowed(op: Op, operands: Sequence[Value], big: Value, small: Value) -> Rule:
    """Gives every tensor the shape of `big` or, with a row for each window, that of `small`."""
    found = Factors()
    before: list[Dim] = []
    after: list[Dim] = []
    for dim, (old, new) in enumerate(zip(big.shape, small.shape, strict=True)):
        first, second = _slid(found, old, new, slides=not _trivial(op, dim))
        before.append(first)
        after.append(second)

    def dims_of(value: Value) -> list[Dim]:
        return [] if not value.shape else before if value.shape == big.shape else after

    linear = _LINEAR.get(op.kind, ())
    return found.rule([dims_of(v) for v in operands], [dims_of(v) for v in op.results], linear)


def _reduce_window(op: Op, operands: Sequence[Value]) -> Rule:
    return _windowed(op, operands, operands[0], op.results[0])


def _select_and_scatter(op: Op, operands: Sequence[Value]) -> Rule:
    """The operand's shape is the result's; the source has a row for each window."""
    source = operands[0] if op.kind == "select_and_scatter_add" else operands[1]
    return _windowed(op, operands, op.results[0], source)


_LINEAR: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "reduce_window_sum": ((0,),),
    "select_and_gather_add": ((0,),),
    "select_and_scatter_add": ((0,),),
}

PRIMITIVES: Mapping[str, Primitive] = {
    **alike(
        ["reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"],
        Primitive(_reduce_window, Work.READS, Fusion.REDUCTION),
    ),
    "select_and_gather_add": Primitive(_reduce_window, fusion=Fusion.KERNEL),
    "select_and_scatter": Primitive(_select_and_scatter),
    "select_and_scatter_add": Primitive(_select_and_scatter, fusion=Fusion.KERNEL),
    "conv_general_dilated": Primitive(
        _conv_general_dilated, Work.TERMS, Fusion.PRODUCT, terms=_conv_terms, local=True
    ),
}
