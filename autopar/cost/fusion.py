"""Fusion as compilers do it: ops that are computed inside their readers, and readers that do so.

Nothing of a fused op is written to memory: each kernel that wants its result computes it anew
from what is stored. These rules are those of XLA's compilers for GPUs and TPUs.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.ir.graph import Op
from autopar.ir.sharding import Sharding
from autopar.rules import Fusion, primitive

# A scatter into zeros that is added to something may put its items there instead.
ADDITIONS = frozenset({"add", "add_any"})

# A matrix product with fewer tiles than the chip has cores is cut along its sum into parts, whose
# results, in f32, are added up afterwards.
_TILE_ITEMS, _TILES_WANTED, _LEAST_SUM, _PART_BYTES = 128 * 128, 128, 128, 4


def is_fused_into_readers(op: Op) -> bool:
    """True if readers may compute the op's results anew instead of loading them."""
    fusion, rule = primitive(op.kind).fusion, op.rule
    if fusion is Fusion.INDEXING:
        return True
    if fusion is not Fusion.BY_RULE or op.graphs or rule is None:
        return False
    return rule.is_elementwise


def is_reduction(op: Op) -> bool:
    """True if the op computes what it reads instead of loading it, and stores its own results."""
    return primitive(op.kind).fusion is Fusion.REDUCTION


def is_product(op: Op) -> bool:
    """True if the op is a matrix product or convolution."""
    return primitive(op.kind).fusion is Fusion.PRODUCT


def is_scatter(op: Op) -> bool:
    """True if the op puts items into what is there."""
    return primitive(op.kind).fusion is Fusion.SCATTER


def has_filter(op: Op) -> bool:
    """True if a convolution's second operand is a filter: small beside the first."""
    if op.rule is None:
        return False
    factors = op.rule.factors
    image, second = (
        math.prod(factors[f].size for dim in dims for f in dim) for dims in op.rule.operands[:2]
    )
    return second < image


def works_in_place(op: Op) -> bool:
    """True if a result may take the buffer of an operand that nobody reads later."""
    if is_scatter(op) or op.kind == "dynamic_update_slice":
        return True
    return primitive(op.kind).fusion is Fusion.BY_RULE and is_fused_into_readers(op)


def work_bytes(op: Op) -> float:
    """The cost of computing an item of the op again, as bytes that could be loaded instead."""
    return primitive(op.kind).redo_bytes


def split_bytes(op: Op, item_count: int, operand: Sharding, sizes: tuple[int, ...]) -> int:
    """Scratch of a matrix product that is cut along its sum; `sizes` are the operand's shard's."""
    tiles = math.ceil(item_count / _TILE_ITEMS)
    if op.kind != "dot_general" or tiles >= _TILES_WANTED or len(operand.dims) != len(sizes):
        return 0
    summed = _summed_dims(op)
    if summed is None:
        return 0
    length = math.prod(sizes[d] for d in summed)
    parts = 1
    while parts * tiles < _TILES_WANTED and length // (2 * parts) >= _LEAST_SUM:
        parts *= 2
    return parts * item_count * _PART_BYTES if parts > 1 else 0


def _summed_dims(op: Op) -> tuple[int, ...] | None:
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
