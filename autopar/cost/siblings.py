"""Kernels that XLA runs as one, as they go alike across what they read: sums, and turns.

Its multi-output fusion joins them if they share an operand, be it only a mask or its places, and
neither waits for the other. Of layers side by side it has the scores of several before it sums up
the first, and on GPUs those of all before it turns the first one's weights over:

    m = max(s, places)   w = turned(s, m, places)   m' = max(s', places)   w' = turned(s', m', ..)
    as they run          s   s'   m, m'   w, w'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.cost.few_blocks import LONGEST_COLUMN
from autopar.cost.kernels import COPY, LARGE_ON_TPU_BYTES, NUMBER_BYTES, Kernel, Stored
from autopar.cost.line import read_line
from autopar.cost.ops import summed_dims
from autopar.cost.order import as_one, either, needed, wait_for_all
from autopar.cost.sizes import Sizes
from autopar.ir.listing import Block, LocalOp
from autopar.ir.values import item_bytes

# What one kernel may hold near a core; tiles of what is turned over lie there, and of sums in f32
# four. Sums over rows take next to nothing, but one kernel has so many at most.
_NEAR_BYTES, _TILE_ITEMS, _TILES_OF_SUM, _SUM_BYTES, _MOST_ROWS = 48 * 1024, 32 * 33, 4, 4, 8
_MOST_BY_GROUPS = 32  # each reads and makes a piece, and a kernel has 96 of both at most
_MOST_ON_TPU = 4  # as DeepSeek's layers show on v5p


Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Across:
    """The shape that a kernel goes over, and across which dims: those that it sums up, or all in
    the order that it leaves them in, or none. At `most` so many run as one.
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    sums: bool
    most: int


def gone_across(block: Block, sizes: Sizes, kernel: Kernel) -> Across | None:
    """Shape and dims of what a kernel sums up, turns over or copies by groups; None for others, and
    by Triton.
    """
    step = kernel.instruction(block)
    if isinstance(step, LocalOp) and kernel.is_light and not kernel.alone:
        op = sizes.op(step.equation)
        dims, shape = summed_dims(op), sizes.shard(step, op)
        if not dims or not shape:
            return None
        if sizes.platform == "tpu":
            is_large = math.prod(shape) * _SUM_BYTES > LARGE_ON_TPU_BYTES
            return None if is_large else Across(shape, dims, True, _MOST_ON_TPU)
        operand = step.operands[0]
        innermost = read_line(block, sizes).orders.innermost(operand, shape) if operand else None
        columns = _NEAR_BYTES // (_TILES_OF_SUM * _TILE_ITEMS * _SUM_BYTES)
        return Across(shape, dims, True, _MOST_ROWS if innermost in dims else columns)
    line = read_line(block, sizes)
    grouped = line.grouped.get(kernel.makes[0])
    if grouped is not None:
        return None if grouped.turned else Across(grouped.shape, (), False, _MOST_BY_GROUPS)
    turned = line.copies.get(kernel.makes[0]) if kernel.at == COPY else None
    at = line.maker.get(turned[0]) if turned is not None else None
    made = block.instructions[at] if at is not None else None
    if turned is None or not isinstance(made, LocalOp):
        return None
    op = sizes.op(made.equation)
    most = _NEAR_BYTES // (_TILE_ITEMS * item_bytes(op.results[0].dtype))
    return Across(sizes.made(made, op), turned[1], False, most)


def with_equals_across(stored: Stored, across: Sequence[Across | None]) -> Stored:
    """The same kernels, those joined that go alike `across`, in an order that can run."""
    kernels = stored.kernels
    # 1. Those that share an operand with their like; those of them that each waits for, as bits.
    alike = Counter[tuple[Across, str]]()
    operands: dict[int, list[tuple[Across, str]]] = {}
    for k, (kernel, own) in enumerate(zip(kernels, across, strict=True)):
        if own is not None:
            large = (n for n in kernel.reads if stored.nbytes.get(n, 0) > NUMBER_BYTES)
            operands[k] = [(own, name) for name in large]
            alike.update(operands[k])
    near = {k: [o for o in own if alike[o] > 1] for k, own in operands.items()}
    bits = {k: 1 << n for n, k in enumerate(k for k, own in near.items() if own)}
    waits, behind = dict[int, int](), dict[str, int]()
    for k, kernel in enumerate(kernels):
        before = 0
        for name in kernel.reads:
            before = either(before, behind.get(name, 0))
        if k in bits:
            waits[k] = before
            before |= bits[k]
        if before:
            behind.update(dict.fromkeys(kernel.makes, before))
    # 2. Each joins the first that it may, and what waits for one of them now waits for all.
    groups = {k: [k] for k in bits}
    reading: dict[tuple[Across, str], dict[int, None]] = {}
    for k in bits:
        own = near[k][0][0]
        first = k
        for g in sorted({g for operand in near[k] for g in reading.get(operand, ())}):
            if len(groups[g]) < own.most and not (waits[k] & bits[g] or waits[g] & bits[k]):
                first = g
                break
        if first != k:
            groups[first] += groups.pop(k)
            bits_of_both = bits[first] | bits[k]
            bits[first], waits[first] = bits_of_both, waits[first] | waits[k]
            wait_for_all(waits, bits_of_both, bits_of_both | waits[first])
        for operand in near[k]:
            reading.setdefault(operand, {})[first] = None
    return as_one(stored, groups.values())


def with_sums_by_makers(
    stored: Stored, made: Sequence[Shape | None], summed: Sequence[Shape | None]
) -> Stored:
    """The same kernels, sums joined with the work that makes what they sum up.

    XLA for GPUs runs element-wise work that others read too with a sum over all that it makes
    (multi-output fusion). What it makes then waits for whatever the sum is of:

        p = f(x)   q = f(y)   s = sum(p + q)        p, q, s = f(x, y)

    `made` are the shapes of what element-wise kernels make, and `summed` those that are summed up
    by one kernel; None for all others.
    """
    needs = needed(stored.kernels)
    pairs = [
        (k, n) for k, shape in enumerate(summed) if shape for n in needs[k] if made[n] == shape
    ]
    bits = {k: 1 << b for b, k in enumerate(sorted({k for pair in pairs for k in pair}))}
    waits = dict.fromkeys(range(len(needs)), 0)  # those of them that each kernel waits for, as bits
    for k, need in enumerate(needs):
        for n in need:
            waits[k] |= waits[n] | bits.get(n, 0)
    groups = {k: [k] for k in bits}
    for k, n in pairs:
        if groups[k] is groups[n]:
            continue
        both = sorted((*groups[k], *groups[n]))
        own = sum(bits[m] for m in both)
        around = {m for member in both for m in needs[member]}.difference(both)
        if any(waits[m] & own for m in around):
            continue
        groups.update(dict.fromkeys(both, both))
        # What waits for one of them now waits for all, and for what these wait for.
        all_waits = own
        for m in around:
            all_waits |= waits[m] | bits.get(m, 0)
        wait_for_all(waits, own, all_waits)
        for m in both:
            waits[m] |= all_waits
    joined = {group[0]: group for group in groups.values() if len(group) > 1}
    return as_one(stored, joined.values())


def summed_at_once(block: Block, sizes: Sizes, kernel: Kernel) -> Shape | None:
    """The shape that a kernel sums up by itself; None for others, as XLA splits long sums."""
    step = kernel.instruction(block)
    if not isinstance(step, LocalOp) or not kernel.is_light or kernel.alone or step.parts:
        return None
    op = sizes.op(step.equation)
    dims, shape = summed_dims(op), sizes.shard(step, op)
    if not dims or math.prod(shape[d] for d in dims) > LONGEST_COLUMN:
        return None
    return shape
