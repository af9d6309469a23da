"""Rules of primitives that read or write at computed positions.

gather         (i w), (b) -> (b w)          rows of a table i: each shard gives those that it
                                            has and zeros for the others, so i is reduced
scatter-add    (i w), (b), (b w) -> (i w)   each shard of the table writes its own rows: i
                                            passes; shards of b are partial sums: b is reduced
dynamic_slice  a dim that is taken in part must be whole: its place is known at run time only
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from autopar.ir.graph import Op, Plain
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import WHOLE, Factors, Fusion, Primitive, Work, fields, ints, optional
from autopar.rules.reduce import combiner_factor


def _dynamic_slice(op: Op, operands: Sequence[Value]) -> Rule:
    """Dims taken whole pass; nobody knows which shards a part of a dim lies on."""
    found = Factors()
    before: list[Dim] = []
    after: list[Dim] = []
    for old, new in zip(operands[0].shape, op.results[0].shape, strict=True):
        before.append(found.new(old) if old == new else found.whole(old))
        after.append(before[-1] if old == new else found.whole(new))
    return found.rule([before, *_scalars(operands[1:])], [after], [(0,)])


def _dynamic_update_slice(op: Op, operands: Sequence[Value]) -> Rule:
    """Each shard of a dim that is written in part writes what falls on it: no need to gather."""
    found = Factors()
    target = found.each(op.results[0].shape)
    update = [
        dim if old == new else found.whole(new)
        for dim, old, new in zip(target, operands[0].shape, operands[1].shape, strict=True)
    ]
    return found.rule([target, update, *_scalars(operands[2:])], [target], [(0, 1)])


def _scalars(operands: Sequence[Value]) -> list[list[Dim]]:
    return [[] for _ in operands]


def _positions(numbers: Mapping[str, Plain], name: str) -> tuple[int, ...]:
    return ints(numbers[name])


def _gather(op: Op, operands: Sequence[Value]) -> Rule:
    """Dims of the operand that are read item by item may be sharded: each shard fills in its own.

    offset dims taken whole pass; index batch dims pass; the index vector must be whole.
    """
    operand, indices = operands[0].shape, operands[1].shape
    numbers = fields(op.param("dimension_numbers"))
    offsets = _positions(numbers, "offset_dims")
    indexed = _positions(numbers, "start_index_map")
    batching = _positions(numbers, "operand_batching_dims")
    absent = (*_positions(numbers, "collapsed_slice_dims"), *batching)
    sizes = op.ints("slice_sizes")
    found = Factors()
    # 1. The result's batch dims are the index dims in order, the vector left out.
    index_dims = found.each(indices[:-1])
    index_batch = dict(
        zip(batching, _positions(numbers, "start_indices_batching_dims"), strict=True)
    )
    # 2. Dims of the operand: paired with the indices', read item by item, or taken as a window.
    read = combiner_factor(operands[0].dtype, "or" if operands[0].dtype == "bool" else "sum")
    before: list[Dim] = []
    window: list[Dim] = []
    for d, (n, size) in enumerate(zip(operand, sizes, strict=True)):
        if d in index_batch:
            before.append(index_dims[index_batch[d]])
            continue
        single = size == 1 and n > 1 and d in indexed
        kind = Kind.PASS if size == n else Kind.REPLICATE
        before.append(found.new(n, read.kind, read.combiner) if single else found.new(n, kind))
        if d not in absent:
            window.append(before[-1] if size == n else found.whole(size))
    # 3. The result: the window's dims at `offset_dims`, those of the indices between them.
    after = _interleaved(len(op.results[0].shape), offsets, window, index_dims)
    vector = found.whole(indices[-1])
    linear = [(0,)] if _fill_is_linear(op) else ()
    return found.rule([before, [*index_dims, vector]], [after], linear)


def _interleaved(
    rank: int, positions: Sequence[int], here: Sequence[Dim], elsewhere: Sequence[Dim]
) -> list[Dim]:
    """Dims at these positions, others in order between them."""
    first, others = iter(here), iter(elsewhere)
    return [next(first) if d in positions else next(others) for d in range(rank)]


def _fill_is_linear(op: Op) -> bool:
    """True if what stands for rows out of bounds is still right after a sum over shards."""
    if op.param("mode") != "FILL_OR_DROP":
        return True
    fill = optional(op, "fill_value")
    if fill is None:
        return op.results[0].is_floating  # not a number, however often it is added
    return isinstance(fill, int | float) and (fill == 0 or math.isnan(fill))


def _scatter(op: Op, operands: Sequence[Value], *, combiner: str, linear: bool = False) -> Rule:
    """Dims written row by row pass, since each shard keeps its own rows.

    Window dims written whole pass. Index batch dims are summed over (or max, min); where order
    counts, as for plain writing, the indices must be whole.
    """
    operand, indices, updates = (v.shape for v in operands)
    numbers = fields(op.param("dimension_numbers"))
    windows = _positions(numbers, "update_window_dims")
    indexed = _positions(numbers, "scatter_dims_to_operand_dims")
    batching = _positions(numbers, "operand_batching_dims")
    inserted = _positions(numbers, "inserted_window_dims")
    index_batching = _positions(numbers, "scatter_indices_batching_dims")
    index_of = dict(zip(batching, index_batching, strict=True))
    merged = combiner_factor(operands[0].dtype, combiner)
    found = Factors()
    index_dims = [
        found.new(n) if d in index_batching else found.new(n, merged.kind, merged.combiner)
        for d, n in enumerate(indices[:-1])
    ]
    window_sizes = iter(updates[d] for d in windows)
    target: list[Dim] = []
    window: list[Dim] = []
    for d, n in enumerate(operand):
        if d in index_of:
            target.append(index_dims[index_of[d]])
            continue
        size = 1 if d in inserted else next(window_sizes)
        by_row = size == 1 and d in indexed
        target.append(found.new(n, Kind.PASS if by_row or size == n else Kind.REPLICATE))
        if d not in inserted:
            window.append(target[-1] if size == n else found.whole(size) if size > 1 else WHOLE)
    vector = found.whole(indices[-1])
    update = _interleaved(len(updates), windows, window, index_dims)
    return found.rule([target, [*index_dims, vector], update], [target], [(0, 2)] if linear else ())


_PUTS = partial(Primitive, work=Work.UPDATES, fusion=Fusion.SCATTER, local=True)
_READS = partial(Primitive, work=Work.NONE, fusion=Fusion.INDEXING, picks=0, local=True)

PRIMITIVES: Mapping[str, Primitive] = {
    "dynamic_slice": _READS(_dynamic_slice),
    "dynamic_update_slice": Primitive(
        _dynamic_update_slice, Work.NONE, Fusion.KERNEL, picks=1, local=True
    ),
    "gather": _READS(_gather),
    "scatter": Primitive(partial(_scatter, combiner="last"), Work.NONE, Fusion.SCATTER, local=True),
    "scatter-add": _PUTS(partial(_scatter, combiner="sum", linear=True), adds=True),
    "scatter-max": _PUTS(partial(_scatter, combiner="max")),
    "scatter-min": _PUTS(partial(_scatter, combiner="min")),
    "scatter-mul": _PUTS(partial(_scatter, combiner="product")),
    "scatter-sub": _PUTS(partial(_scatter, combiner="sum", linear=True), adds=True),
}
