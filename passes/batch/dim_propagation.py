"""Propagation of the batch dim through one op: where its results hold rows, or why it couples them.

Rows lie in a dim as outer x batch x inner. Most ops are read off the factors of their rule:

    dot x[b,k] w[k,n] -> y[b,n]     b is a factor of y: rows stay rows
    reduce_sum y[b,n] -> z[n]       b is reduced: z is a partial sum
    sort y[b,n] over b              b must be replicated: rows are coupled (E5)

A reshape keeps the items before and after; slices and pads may take or add whole copies of the
batch. Two dims of rows in one value are E7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.batching import Rows
from autopar.ir.graph import Op
from autopar.ir.rule import Dims, Kind, Rule
from autopar.ir.values import Value
from autopar.rules import REPLICATED
from autopar.rules.primitive import fields, ints, pairs
from autopar.rules.propagation import item_rule
from autopar.rules.shape import reading_order

COUPLES = "mixes rows of the batch"
UNEVEN = "is given rows that lie in different orders"
TWICE = "holds the rows of the batch in two dims"


@dataclass(frozen=True)
class RowFlow:
    """The rows of the results; the combiner of results without rows; or a fault instead."""

    results: tuple[Rows | None, ...] = ()
    combiner: str = ""
    fault: str = ""


@dataclass(frozen=True)
class AlignedOp:
    """An op on the whole batch and on a part, and the rows of its operands.

    Rows marked `uniform` are all alike, so that they may be taken to lie in any order.
    """

    whole: Op
    part: Op
    operands: tuple[Value, ...]  # of the whole batch; literals are nameless values
    rows: tuple[Rows | None, ...]
    uniform: tuple[bool, ...]
    batch: int
    microbatches: int

    @property
    def first(self) -> Rows:
        """The rows of the first operand that has any that are not uniform, else of any."""
        found = [(u, r) for u, r in zip(self.uniform, self.rows, strict=True) if r is not None]
        return min(found, key=lambda pair: pair[0])[1]


def propagate_rows(aligned: AlignedOp) -> RowFlow:
    """The rows through one op that holds no bodies."""
    # 1. An op whose rule says something else of rows than of shards has a reader of its own.
    own = _OWN.get(aligned.whole.kind)
    flow = own(aligned) if own is not None else None
    if flow is not None:
        return flow
    # 2. The factors that rows lie in, with the items around them. Operands whose rows differ come
    #    first: uniform rows lie wherever these say.
    rule = item_rule(aligned.whole, aligned.operands)
    carried: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(aligned.rows)), key=lambda i: aligned.uniform[i]):
        rows = aligned.rows[i]
        if rows is None:
            continue
        place = _factor_of_rows(rule, rule.operands[i][rows.dim], rows, aligned.batch)
        if place is None:
            return RowFlow(fault=COUPLES)
        factor, around = place
        if carried.setdefault(factor, around) != around and not aligned.uniform[i]:
            return RowFlow(fault=UNEVEN)
    # 3. Such a factor may be split only if the op needs nothing of it whole or in another order.
    kinds = {rule.factors[f].kind for f in carried}
    if kinds & {Kind.REPLICATE, Kind.PERMUTE}:
        return RowFlow(fault=COUPLES)
    # 4. Results with the factor hold rows in one dim; those without are sums, by its combiner.
    found = [_rows_of_factors(rule, dims, carried) for dims in rule.results]
    if any(len(places) > 1 for places in found):
        return RowFlow(fault=TWICE)
    combiners = {rule.factors[f].combiner for f in carried if rule.factors[f].kind is Kind.REDUCE}
    if not all(found) and len(combiners) != 1:
        return RowFlow(fault=COUPLES)
    return RowFlow(tuple(p[0] if p else None for p in found), "".join(combiners))


def is_opaque(op: Op) -> bool:
    """True if the op is code that cannot be seen into, and the user gave no rule for it."""
    rule = op.rule
    if rule is None or not rule.known:
        return True
    return op.kind in REPLICATED and all(f.kind is Kind.REPLICATE for f in rule.factors)


# -- between rows of a dim and factors of a rule -------------------------------------------


def _factor_of_rows(
    rule: Rule, dim: Sequence[int], rows: Rows, batch: int
) -> tuple[int, tuple[int, int]] | None:
    """The factor of a dim that the rows lie in, with the items before and after them in it."""
    before = 1
    for f in dim:
        size = rule.factors[f].size
        # Rows (outer, batch, inner) in a dim of factors f0 x f1 x ..: found in factor f if it holds
        # whole copies of the batch, and the factors before and after it make up outer and inner.
        if rows.outer % before == 0:
            outer = rows.outer // before
            if size % (outer * batch) == 0:
                inner = size // (outer * batch)
                after = math.prod(rule.factors[g].size for g in dim) // (before * size)
                if inner * after == rows.inner:
                    return f, (outer, inner)
        before *= size
    return None


def _rows_of_factors(rule: Rule, dims: Dims, carried: Mapping[int, tuple[int, int]]) -> list[Rows]:
    """The rows of a value of these dims, one for each factor in it that holds any."""
    places: list[Rows] = []
    for d, dim in enumerate(dims):
        sizes = [rule.factors[f].size for f in dim]
        for at, f in enumerate(dim):
            if f in carried:
                outer, inner = carried[f]
                before, after = math.prod(sizes[:at]), math.prod(sizes[at + 1 :])
                places.append(Rows(d, before * outer, inner * after))
    return places


# -- ops whose rules say something else ----------------------------------------------------


def _reshape(given: AlignedOp) -> RowFlow:
    """As many items must lie before and after the rows as did before."""
    rows, shape, new = given.first, given.operands[0].shape, given.whole.results[0].shape
    order = reading_order(given.whole, len(shape))
    old, at = [shape[d] for d in order], order.index(rows.dim)
    # [B, S] -> [B * S]: items before the rows 1, after them S. [S, B] -> [S * B]: S and 1.
    before = math.prod(old[:at]) * rows.outer
    after = math.prod(old[at + 1 :]) * rows.inner
    own = given.part.results[0].shape
    for d, (n, part) in enumerate(zip(new, own, strict=True)):
        left, right = math.prod(new[:d]), math.prod(new[d + 1 :])
        if n == part:
            continue
        if not (left and right):  # of no items at all, whose rows stay as they are
            found = Rows(d, rows.outer, rows.inner)
        elif before % left == 0 and after % right == 0:
            found = Rows(d, before // left, after // right)
        else:
            continue
        if found.outer * given.batch * found.inner == n:
            return RowFlow((found,))
    return RowFlow(fault=COUPLES)


def _by_number(given: AlignedOp, indexed: str) -> RowFlow | None:
    """Rows that are read or written by their number are another microbatch's."""
    numbers = fields(given.whole.param("dimension_numbers"))
    rows = given.rows[0]
    by_number = rows is not None and rows.dim in ints(numbers[indexed])
    return RowFlow(fault=COUPLES) if by_number else None


def _update(given: AlignedOp) -> RowFlow | None:
    """A part of a dim of rows is written at a place that counts from the first row."""
    rows = given.rows[0]
    if rows is None:
        return RowFlow(fault=COUPLES)
    old, new = (v.shape[rows.dim] for v in given.operands[:2])
    return RowFlow(fault=COUPLES) if old != new else None


def _bitwise(given: AlignedOp, combiner: str) -> RowFlow | None:
    """Reductions that devices cannot combine, but microbatches can."""
    if given.first.dim not in given.whole.ints("axes"):
        return None
    return RowFlow((None,) * len(given.whole.results), combiner)


def _random_keys(given: AlignedOp) -> RowFlow:
    """An array of random keys: each of its rows makes its own numbers."""
    rows = given.first
    ranks = [len(v.shape) for v in given.whole.results]
    keyed = given.rows[0] is not None or given.whole.kind == "random_fold_in"
    held = keyed and rows.dim < min(ranks)
    return RowFlow((rows,) * len(ranks)) if held else RowFlow(fault=COUPLES)


# -- whole copies of the batch, one after the other ----------------------------------------


def _concatenate(given: AlignedOp) -> RowFlow | None:
    """Batches joined one after the other, each microbatch's of its own: (a + b) x rows."""
    axis = given.whole.whole("dimension")
    if given.first.dim != axis:
        return None
    inner = {r.inner for r in given.rows if r is not None}
    if None in given.rows or len(inner) != 1 or any(r and r.dim != axis for r in given.rows):
        return RowFlow(fault=COUPLES)
    return RowFlow((Rows(axis, sum(r.outer for r in given.rows if r), inner.pop()),))


def _slice(given: AlignedOp) -> RowFlow | None:
    """Some of several batches that lie one after the other."""
    rows = given.first
    whole, part = given.whole, given.part
    start, end = whole.ints("start_indices")[rows.dim], whole.ints("limit_indices")[rows.dim]
    if end - start == given.operands[0].shape[rows.dim]:
        return None
    own = part.ints("start_indices")[rows.dim], part.ints("limit_indices")[rows.dim]
    strides = dict(whole.params).get("strides")
    return _copies(given, (start, end), own, strides is not None and ints(strides)[rows.dim] != 1)


def _pad(given: AlignedOp) -> RowFlow | None:
    """Whole batches put before or after, as the gradient of taking some has it."""
    rows = given.first
    config = pairs(given.whole.param("padding_config"))[rows.dim]
    if not any(config):
        return None
    own = pairs(given.part.param("padding_config"))[rows.dim]
    return _copies(given, config[:2], own[:2], bool(config[2]))


def _copies(given: AlignedOp, whole: Sequence[int], part: Sequence[int], strided: bool) -> RowFlow:
    """The result holds as many batches as its size says, if its edges are those of batches."""
    rows, step = given.first, given.batch * given.first.inner
    even = all(
        n % step == 0 and own * given.microbatches == n for n, own in zip(whole, part, strict=True)
    )
    count = given.whole.results[0].shape[rows.dim] // step
    if strided or not even or not count:
        return RowFlow(fault=COUPLES)
    return RowFlow((Rows(rows.dim, count, rows.inner),))


def _split(given: AlignedOp) -> RowFlow | None:
    """Several batches taken apart."""
    rows, step = given.first, given.batch * given.first.inner
    if given.whole.whole("axis") != rows.dim:
        return None
    counts = [v.shape[rows.dim] for v in given.whole.results]
    if any(n % step for n in counts):
        return RowFlow(fault=COUPLES)
    return RowFlow(tuple(Rows(rows.dim, n // step, rows.inner) for n in counts))


_OWN: Mapping[str, Callable[[AlignedOp], RowFlow | None]] = {
    "concatenate": _concatenate,
    "dynamic_update_slice": _update,
    "gather": lambda given: _by_number(given, "start_index_map"),
    "pad": _pad,
    "reduce_prod": lambda given: _bitwise(given, "mul"),
    "reduce_xor": lambda given: _bitwise(given, "xor"),
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"],
        lambda given: _by_number(given, "scatter_dims_to_operand_dims"),
    ),
    **dict.fromkeys(
        ["random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split"],
        _random_keys,
    ),
    **dict.fromkeys(["random_unwrap", "random_wrap", "random_clone"], _random_keys),
}
