"""Facts of one op that decide its kernels: what it fuses with, sums over, pads and moves."""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.cluster.chip import Platform
from autopar.ir.graph import Op
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding
from autopar.rules import Fusion, primitive
from autopar.rules.primitive import fields, ints, pairs

# A scatter into zeros that is added to something may put its items there instead.
ADDITIONS = frozenset({"add", "add_any"})

# A matrix product with fewer tiles than the chip has cores is cut along its sum into parts, whose
# results, in f32, are added up afterwards.
_TILE_ITEMS, _TILES_WANTED, _LEAST_SUM, _PART_BYTES = 128 * 128, 128, 128, 4

# XLA for GPUs leaves products of a matrix with a vector to BLAS where they are this large.
_LEAST_BY_BLAS = 10_000_000

# Rows of 4,096 XLA gives to Triton, rows of 50,304 it does not.
LONGEST_ROW = 8192


def is_fused_into_readers(op: Op) -> bool:
    """True if readers may compute the op's results anew instead of loading them."""
    fusion, rule = primitive(op.kind).fusion, op.rule
    if fusion is Fusion.INDEXING or _sums_nothing(op):
        return True
    if fusion is not Fusion.BY_RULE or op.graphs or rule is None:
        return False
    return rule.is_elementwise


def is_reduction(op: Op) -> bool:
    """True if the op computes what it reads instead of loading it, and stores its own results."""
    if op.kind == "dot_general":
        return _is_by_vector(op) and not _sums_nothing(op)
    return primitive(op.kind).fusion is Fusion.REDUCTION and not _sums_nothing(op)


def summed_dims(op: Op) -> tuple[int, ...] | None:
    """The dims that a reduction sums up; None for other ops, or where that is not known."""
    rule = op.rule
    if rule is None or not rule.operands or primitive(op.kind).fusion is not Fusion.REDUCTION:
        return None
    kept = {f for dim in rule.results[0] for f in dim}
    return tuple(d for d, dim in enumerate(rule.operands[0]) if kept.isdisjoint(dim))


def is_product(op: Op) -> bool:
    """True if the op is a matrix product or convolution that sums something up."""
    if primitive(op.kind).fusion is not Fusion.PRODUCT or _sums_nothing(op):
        return False
    return not _is_by_vector(op)


def _is_by_vector(op: Op) -> bool:
    """True for a product with vectors, of which XLA makes a multiplication and a reduction.

    Of a large matrix it does not: what it reads of that counts by one of its batches.
    """
    rule = op.rule
    if op.kind != "dot_general" or rule is None:
        return False
    return _multiplies_vectors(rule.operands[0], rule.operands[1], rule.results[0], rule)


@lru_cache(maxsize=4096)
def _multiplies_vectors(
    left: tuple[tuple[int, ...], ...],
    right: tuple[tuple[int, ...], ...],
    result: tuple[tuple[int, ...], ...],
    rule: Rule,
) -> bool:
    one, other, kept = ({f for dim in dims for f in dim} for dims in (left, right, result))
    size = {f: rule.factors[f].size for f in one | other}
    rows, columns, terms = (
        math.prod(size[f] for f in factors)
        for factors in ((one & kept) - other, (other & kept) - one, (one & other) - kept)
    )
    return min(rows, columns) == 1 and (rows + columns) * terms < _LEAST_BY_BLAS


def _sums_nothing(op: Op) -> bool:
    """True for an outer product, of which XLA makes a multiplication, or a sum over dims of 1."""
    rule = op.rule
    if rule is None or not rule.operands or not rule.results:
        return False
    if op.kind != "dot_general" and primitive(op.kind).fusion is not Fusion.REDUCTION:
        return False
    kept = {f for dim in rule.results[0] for f in dim}
    return all(f in kept or rule.factors[f].size == 1 for dim in rule.operands[0] for f in dim)


def begins_as_found(op: Op, platform: Platform) -> bool:
    """True of a scan whose stacks begin as memory that is found, not as zeros."""
    return platform == "gpu" and op.kind == "scan" and op.whole("unroll") == 1


def is_scatter(op: Op) -> bool:
    """True if the op puts items into what is there."""
    return primitive(op.kind).fusion is Fusion.SCATTER


def operand_shape(op: Op, operand: int) -> tuple[int, ...]:
    """The shape of an op's operand on all devices; () where its rule does not tell."""
    rule = op.rule
    if rule is None or operand >= len(rule.operands):
        return ()
    return tuple(math.prod(rule.factors[f].size for f in dim) for dim in rule.operands[operand])


def made_by(rule: Rule) -> list[int]:
    """Makers of each dim of a product's result: 0 is both operands, 1 the second, 2 the first."""
    first, second = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    dims = [set(dim) for dim in rule.results[0]]
    return [0 if d <= first & second else 1 if d <= second else 2 for d in dims]


def is_better_swapped(product: Op, reader: Op) -> bool:
    """True if a batched product should be made with its operands swapped for a reader.

    It is turned over so that what its first operand makes comes last. Made with that innermost,
    scores lie in rows, as the sums of a softmax read them. Of products without a batch XLA swaps
    the operands itself, and where either operand makes one dim it has the result lie so.
    """
    if product.kind != "dot_general" or reader.kind != "transpose" or product.rule is None:
        return False
    makers = made_by(product.rule)
    is_grouped = {*makers} == {0, 1, 2} and max(makers.count(1), makers.count(2)) > 1
    return is_grouped and makers[reader.ints("permutation")[-1]] == 2


def group_count(op: Op) -> int:
    """The number of groups that the rows of a product come in; 1 for all but ragged products."""
    if op.kind != "ragged_dot_general" or op.rule is None:
        return 1
    return math.prod(op.rule.factors[f].size for f in op.rule.operands[2][-1])


def has_filter(op: Op) -> bool:
    """True if a convolution slides a filter: it has no more taps than the result has places.

    For a filter's own gradient, the gradient of what it made is slid to as few places as it has.
    """
    taps, made = _taps(op), op.results[0].shape
    if not taps:
        return False
    at = ints(fields(op.param("dimension_numbers"))["out_spec"])[2:]
    return math.prod(taps) <= math.prod(made[d] for d in at)


def _taps(op: Op) -> list[int]:
    """The sizes of what a convolution slides along the dims of its window; none if not known."""
    shape = operand_shape(op, 1)
    at = ints(fields(op.param("dimension_numbers"))["rhs_spec"])[2:]
    return [shape[d] for d in at] if shape else []


def features(op: Op) -> int:
    """The dim of a convolution's result that the second operand makes."""
    return ints(fields(op.param("dimension_numbers"))["out_spec"])[1]


def image_features(op: Op) -> int | None:
    """The features of the image that a convolution reads; None where they come in groups.

    Of a filter's gradient those of its image: what it makes has them where others have rows.
    """
    if op.whole("feature_group_count") != 1 or op.whole("batch_group_count") != 1:
        return None
    numbers = fields(op.param("dimension_numbers"))
    if has_filter(op):
        return operand_shape(op, 1)[ints(numbers["rhs_spec"])[1]]
    return op.results[0].shape[ints(numbers["out_spec"])[0]]


def padded_share(op: Op) -> float:
    """The size of the image that a convolution reads, padded, over that of the one it is given.

    It is 1 if the kernel pads it itself: as much on either side, and nothing in between.
    """
    padding = pairs(op.param("padding"))
    image = operand_shape(op, 0)
    is_even = not _lies_apart(op) and all(low == high for low, high in padding)
    if not image or is_even or _slides_image(op):
        return 1.0
    at = ints(fields(op.param("dimension_numbers"))["lhs_spec"])[2:]
    share = 1.0
    for d, (low, high), apart in zip(at, padding, op.ints("lhs_dilation"), strict=True):
        share *= ((image[d] - 1) * apart + 1 + low + high) / image[d]
    return share


def _lies_apart(op: Op) -> bool:
    """True for a convolution with zeros between the places of the image that it reads."""
    return any(apart > 1 for apart in op.ints("lhs_dilation"))


def has_features_for_rows(op: Op) -> bool:
    """True if XLA for GPUs writes both operands of a convolution with their features outermost.

    It slides one over the other as if that was a filter: features are rows to it, rows features.
    """
    return _slides_image(op) or _slides_gradient(op)


def _slides_image(op: Op) -> bool:
    """True if XLA for GPUs slides a convolution's image over the other operand, the larger one.

    Taps may lie apart, as the image's places do in the gradient of a transposed convolution's
    filter (ConvOperandSwapper). In three dims it leaves them.
    """
    return _lies_apart(op) and len(op.ints("lhs_dilation")) < 3 and not has_filter(op)


def _slides_gradient(op: Op) -> bool:
    """True if XLA for GPUs slides what a filter made over its image, as if that was the filter.

    It does for the gradient of a filter whose taps lie apart, for which cuDNN has no call.
    """
    is_apart = any(step > 1 for step in op.ints("window_strides"))
    groups = op.whole("feature_group_count"), op.whole("batch_group_count")
    return is_apart and groups == (1, 1) and not _lies_apart(op) and not has_filter(op)


def rows_read(op: Op) -> int:
    """The rows of the batch that the gradient of a filter sums over: features to such a call."""
    return operand_shape(op, 1)[ints(fields(op.param("dimension_numbers"))["rhs_spec"])[1]]


def filled_share(op: Op) -> float:
    """The size of a filter with zeros between its taps over that of the filter itself.

    It is 1 if the kernel leaves them apart itself: where it pads the image itself, and in cuDNN's
    call for the gradient of a filter that was slid in strides.
    """
    taps = _taps(op)
    has_call = not has_filter(op) and not _slides_gradient(op)
    if not taps or has_call or padded_share(op) == 1 or _lies_apart(op):
        return 1.0
    apart = zip(taps, op.ints("rhs_dilation"), strict=True)
    return math.prod(((n - 1) * steps + 1) / n for n, steps in apart)


def is_run_backward(op: Op, turned: bool) -> bool:
    """True for the gradient of a convolution's input, which cuDNN has a call for.

    It reads the filter `turned` round, unless that has one tap. A convolution with strides that
    does not, as a transposed one that is written so, or whose features come in groups, XLA for GPUs
    writes as one of inputs that lie apart. With taps or windows apart it is one like any other.
    """
    if op.whole("feature_group_count") != 1 or not has_filter(op):
        return False
    if _lies_apart(op):
        return turned or _has_one_tap(op)
    return _turns_back(op, turned)


def slides_forward(op: Op, turned: bool) -> bool:
    """True if a convolution is none of the gradients that cuDNN has calls for.

    That of an input reads the filter `turned` round, unless that has one tap.
    """
    return has_filter(op) and not _lies_apart(op) and not _turns_back(op, turned)


def _turns_back(op: Op, turned: bool) -> bool:
    """True if a filter is `turned` round, as that of an input's gradient, and may be to cuDNN.

    Neither the taps of that lie apart nor the windows of the convolution.
    """
    steps = (*op.ints("rhs_dilation"), *op.ints("window_strides"))
    return turned and not _has_one_tap(op) and all(step == 1 for step in steps)


def _has_one_tap(op: Op) -> bool:
    """True if a convolution's filter has one tap, so that turned round it is the same."""
    return all(n == 1 for n in _taps(op))


def made_share(op: Op) -> float:
    """The size of what such a call makes over that of the gradient, which is cut out of it.

    The image of its convolution is padded as much on either side, and the gradient is that image's.
    """
    numbers = fields(op.param("dimension_numbers"))
    image, taps, made = operand_shape(op, 0), operand_shape(op, 1), op.results[0].shape
    if not image or not taps:
        return 1.0
    at = [ints(numbers[name])[2:] for name in ("lhs_spec", "rhs_spec", "out_spec")]
    padding, dilation = pairs(op.param("padding")), op.ints("lhs_dilation")
    share = 1.0
    for k, (low, _) in enumerate(padding):
        inputs, window, size = image[at[0][k]], taps[at[1][k]], made[at[2][k]]
        before = window - 1 - low
        behind = max(0, (inputs - 1) * dilation[k] + window - size - before)
        share *= (size + abs(before - behind)) / size
    return share


def padding(op: Op) -> str:
    """The pads of a convolution's image: those with the same share the copy."""
    rows = zip(pairs(op.param("padding")), op.ints("lhs_dilation"), strict=True)
    return ", ".join(f"{low}:{high}:{apart}" for (low, high), apart in rows)


def works_in_place(op: Op) -> bool:
    """True if a result may take the buffer of an operand that nobody reads later."""
    if is_scatter(op) or op.kind == "dynamic_update_slice":
        return True
    return primitive(op.kind).fusion is Fusion.BY_RULE and is_fused_into_readers(op)


def work_bytes(op: Op) -> float:
    """The cost of computing an item of the op again, as bytes that could be loaded instead."""
    return primitive(op.kind).redo_bytes


def gpu_bytes(op: Op) -> float:
    """The bytes that a GPU could load while it computes an item of the op; 0 of what is cheap."""
    return primitive(op.kind).gpu_bytes


def split_bytes(op: Op, item_count: int, operand: Sharding, sizes: tuple[int, ...]) -> int:
    """Scratch of a matrix product that is cut along its sum; `sizes` are the operand's shard's."""
    tiles = math.ceil(item_count / _TILE_ITEMS)
    if op.kind != "dot_general" or tiles >= _TILES_WANTED or len(operand.dims) != len(sizes):
        return 0
    summed = terms_of_product(op)
    if summed is None:
        return 0
    length = math.prod(sizes[d] for d in summed)
    parts = 1
    while parts * tiles < _TILES_WANTED and length // (2 * parts) >= _LEAST_SUM:
        parts *= 2
    return parts * item_count * _PART_BYTES if parts > 1 else 0


def sums_up_batches(op: Op) -> bool:
    """True if the op is a matrix product with a dim of batch."""
    return op.kind == "dot_general" and op.rule is not None and terms_of_product(op) is None


def terms_of_product(op: Op) -> tuple[int, ...] | None:
    """The first operand's summed dims; None for batched products, which have tiles enough."""
    rule = op.rule
    if rule is None:
        return None
    return _dims_of_sum(rule.operands[0], rule.operands[1], rule.results[0])


@lru_cache(maxsize=4096)
def _dims_of_sum(
    left: tuple[tuple[int, ...], ...],
    right: tuple[tuple[int, ...], ...],
    result: tuple[tuple[int, ...], ...],
) -> tuple[int, ...] | None:
    kept = set(result)
    if any(dim and dim in kept and dim in right for dim in left):
        return None
    return tuple(d for d, dim in enumerate(left) if dim and dim not in kept)
