"""The orders in which values lie in memory, and the values that are written out in another.

Only batched products fix the order of a value's dims, as attention's do: the results of all else
lie as their readers wish. Element-wise work on a product's result lies as that does. A product
wants the dims that it sums over, and those that it keeps, side by side, and element-wise work wants
all that it reads in one order:

    weights of attention    [batch, kv, group, query, key]
    times values            sums over key: taken as they lie
    for values' gradient    sums over group and query: written anew, [batch, kv, key, group, query]

A GPU turns a value over in tiles; where the dims that come to lie innermost are too short for them,
XLA's model has each item loaded by itself, in a transaction of many bytes. Dims that are one long
on a device have no order, so how a value is sharded decides which copies are made.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopar.cluster.chip import Platform
from autopar.cost.ops import made_by
from autopar.ir.graph import Op
from autopar.ir.rule import Rule
from autopar.ir.values import item_bytes

# The length of dims from which tiles turn them over; the bytes that are loaded for one item alone.
_LEAST_TILED, _TRANSACTION_BYTES = 8, 64


def wasted_bytes(nbytes: int, dtype: str) -> int:
    """The bytes that are loaded beside those of a value whose items are loaded one by one."""
    return nbytes * (_TRANSACTION_BYTES // item_bytes(dtype) - 1)


@dataclass(frozen=True, slots=True)
class Order:
    """Dims that are longer than one on a device, the slowest first, their sizes there, and the
    product that they come from: how late a compiler comes to it, and what it makes.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    product: int
    made: str

    def is_tiled(self, wanted: Sequence[int]) -> bool:
        """True if tiles can turn a value over from this order to another.

        [a, b, c] -> [c, b, a] takes tiles of a and of b x c, if c is a power of two, else of c
        alone; [a, b, c] -> [b, c, a] of a and of b x c, and [a, b, c] -> [a, c, b] of b and c. Of
        [a, b, c] -> [c, a, b] it takes tiles of a x b and c: what stays side by side is one dim.
        """
        if set(self.dims) != set(wanted) or self.dims[-1:] == wanted[-1:]:
            return True
        size_of = dict(zip(self.dims, self.sizes, strict=True))
        behind = self.dims[self.dims.index(wanted[-1]) + 1 :]
        innermost = size_of[self.dims[-1]]
        if innermost & (innermost - 1):  # as many of them as stay side by side
            stop = wanted.index(behind[-1]) + 1
            runs = (behind[k:] for k in range(len(behind)))
            behind = next(r for r in runs if r == tuple(wanted[max(0, stop - len(r)) : stop]))
        places = [self.dims.index(d) for d in wanted]
        ends = range(1, len(wanted))
        stays = itertools.takewhile(lambda k: places[-k - 1] == places[-k] - 1, ends)
        across = wanted[-1 - sum(1 for _ in stays) :]
        sides = (math.prod(size_of[d] for d in side) for side in (across, behind))
        return min(sides) >= _LEAST_TILED

    def sized(self, local: Sequence[int]) -> Order:
        """The order on a device that has these sizes of all dims."""
        dims = tuple(d for d in self.dims if local[d] > 1)
        return replace(self, dims=dims, sizes=tuple(local[d] for d in dims))


@dataclass(frozen=True)
class Turned:
    """An operand that lies in an order, and its reader's: that of `first`, or what a product takes.

    The order is in terms of a product's operand, and of the result of element-wise work. In a
    product it stands on a `side`, 0 or 1.
    """

    operand: int
    name: str
    order: Order
    first: Order | None = None
    side: int = 0

    @property
    def copied(self) -> str:
        """The value that is written out: for element-wise work, the product's own result."""
        return self.name if self.first is None else self.order.made

    def sized(self, local: Sequence[int]) -> Turned:
        """The same on a device that has these sizes of all dims."""
        first = self.first.sized(local) if self.first is not None else None
        return replace(self, order=self.order.sized(local), first=first)

    def wanted(self, rule: Rule, on_gpu: bool) -> tuple[int, ...] | None:
        """The order in which it is written out for an op, None where it is read as it lies."""
        if self.first is None:
            return _wanted_by_product(rule, self.operand, self.side, self.order)
        return None if self.order.is_tiled(self.first.dims) or not on_gpu else self.first.dims


class Orders:
    """Follows the orders of values from op to op.

    `visits` are the numbers of values that a compiler visits before each, `turned_over` the values
    that transposes read.
    """

    def __init__(
        self, visits: Mapping[str, int], turned_over: Set[str | None] = frozenset()
    ) -> None:
        self._of: dict[str, Order] = {}
        self._gathered: dict[str, Order] = {}
        self._made_by: dict[str, tuple[tuple[int, ...], Order]] = {}  # products: each dim's maker
        self._swapped: set[str] = set()
        self._visits, self._turned_over = visits, turned_over

    @property
    def any(self) -> bool:
        """True if an order is fixed."""
        return bool(self._of or self._gathered)

    def product(
        self,
        op: Op,
        operands: Sequence[str | None],
        made: str,
        local: Sequence[int],
        swapped: bool = False,
    ) -> list[Turned]:
        """The operands of a product that lie in an order; notes how a batched one's result lies.

        `local` are the result's sizes on a device. Its operands may be `swapped`.
        """
        assert op.rule is not None
        batched, makers = bool(_batch_of(op.rule)), tuple(made_by(op.rule))
        dims: Sequence[int] = range(len(local))
        if batched and swapped:
            self._swapped.add(made)
            dims = sorted(dims, key=makers.__getitem__)
        lies = Order(tuple(dims), (), self._visits.get(made, 0), made).sized(local)
        self._made_by[made] = makers, lies
        if batched:
            self._of[made] = lies
        found = list[Turned]()
        for k, name in enumerate(operands):
            order = self._of.get(name or "")
            if order is None and not batched:
                order = self._gathered.get(name or "")
            if name is not None and order is not None:
                found.append(Turned(k, name, order, side=self._side(op.rule, k, made)))
        return found

    def _side(self, rule: Rule, operand: int, made: str) -> int:
        """The side of a product that an operand stands on.

        Where the result is only turned over, XLA swaps the operands of the product instead, but
        for batched ones, which a program may have swapped.
        """
        turned = made in self._swapped if _batch_of(rule) else made in self._turned_over
        return operand ^ turned

    def taken(self, rule: Rule, operand: int, name: str, made: str) -> Sequence[int]:
        """The dims of a product's operand in the order in which it takes them.

        What lies in no order lies as it is wished, in that of its dims if the product takes it so.
        """
        dims = tuple(range(len(rule.operands[operand])))
        order = self._of.get(name) or Order(dims, (_LEAST_TILED,) * len(dims), 0, name)
        side = self._side(rule, operand, made)
        return _wanted_by_product(rule, operand, side, order) or order.dims

    def written(self, rule: Rule, operand: int, made: str, local: Sequence[int]) -> tuple[int, ...]:
        """The dims of a batched product's operand in the order in which XLA writes one; else none.

        So lies what is computed for it, but for what comes from another batched product. One dim
        that is kept, and one that is summed up, it takes either way; the operands are swapped where
        the result is only turned over. `local` are the sizes of the operand on a device.
        """
        if not _batch_of(rule):
            return ()
        side = operand ^ (made in self._swapped or made in self._turned_over)
        order = Order(tuple(range(len(local))), (), 0, made).sized(local)
        sides = by_kind(order.dims, rule, operand)
        several = max(Counter(kind for kind, _ in sides if kind).values(), default=0) > 1
        return _as_written(sides, side) if several else order.dims

    def element_wise(self, op: Op, operands: Sequence[str | None], made: str) -> list[Turned]:
        """The operands that lie otherwise than the first; notes how the result lies.

        What comes from the product that the compiler visits latest gives way to the other.
        """
        given = [(k, name) for k, name in enumerate(operands) if name in self._of and name]
        if op.rule is None:
            return []
        if not given:
            lying = ((k, self._gathered.get(name or "")) for k, name in enumerate(operands))
            carried = (_carried(order, op.rule, k) for k, order in lying if order is not None)
            if (first := next(carried, None)) is not None:
                self._gathered[made] = first
            return []
        known = [(k, name, _carried(self._of[name], op.rule, k)) for k, name in given]
        lies = [(k, name, order) for k, name, order in known if order is not None]
        if not lies:
            return []
        first = self._of[made] = min((o for _, _, o in lies), key=lambda order: order.product)
        return [Turned(k, name, o, first) for k, name, o in lies if o.dims != first.dims]

    def gathered(self, name: str, dim: int, local: Sequence[int]) -> None:
        """Notes that a value was gathered along a dim, which comes to lie outermost.

        Only products without a dim of batch are known to want it otherwise. `local` are the sizes
        of the value on a device.
        """
        dims = tuple(sorted(range(len(local)), key=lambda d: d != dim))
        self._gathered[name] = Order(dims, (), 0, name).sized(local)

    def begun_inside(self, name: str, dim: int) -> Order | None:
        """The order of a product's own result, if it cannot be made with a dim outermost.

        Either operand's dims may come first, in their order, but where there are several of batch.
        """
        makers, order = self._made_by.get(name, ((), None))
        if order is None or dim not in order.dims:
            return None
        batches = [d for d in order.dims if makers[d] == 0]
        alike = [d for d in order.dims if makers[d] == makers[dim]]
        first = alike[0] if len(batches) < 2 else order.dims[0]
        return order if first != dim else None

    def is_turned(self, name: str) -> bool:
        """True if a value lies in another order than that of its dims."""
        order = self._of.get(name) or self._gathered.get(name)
        return order is not None and [*order.dims] != sorted(order.dims)

    def innermost(self, name: str, local: Sequence[int]) -> int | None:
        """The dim of a value of these sizes on a device that lies innermost; None of one item."""
        order = self._of.get(name)
        dims = order.dims if order is not None else range(len(local))
        return next((d for d in reversed(dims) if local[d] > 1), None)

    def renamed(self, source: str, name: str) -> None:
        """Another name for a value, or its sum over devices, which lies as it does."""
        for orders in (self._of, self._gathered):
            if source in orders:
                orders[name] = orders[source]


class Layouts:
    """Names what a block's ops read in another order, on a device of a platform.

    `apart` are copies whose items are loaded one by one, by name, with the product's results that
    they are made from. `before` are those of a product's result, maybe cast, that stand for what is
    computed of it. `copies` are all, with the value and the order that each is written in.
    """

    def __init__(
        self,
        visits: Mapping[str, int],
        platform: Platform,
        turned_over: Set[str | None] = frozenset(),
    ) -> None:
        self.orders = Orders(visits, turned_over)
        self._on_gpu = platform == "gpu"
        self.apart: dict[str, str] = {}
        self.before: dict[str, str] = {}
        self.copies: dict[str, tuple[str, tuple[int, ...]]] = {}

    def product(
        self,
        op: Op,
        operands: Sequence[str | None],
        made: str,
        local: Sequence[int],
        swapped: bool = False,
    ) -> Mapping[str, str]:
        """Operands that a product wants in another order, with names for them in that order."""
        found: dict[str, str] = {}
        if op.rule is not None:
            for turned in self.orders.product(op, operands, made, local, swapped):
                wanted = turned.wanted(op.rule, self._on_gpu)
                if wanted is not None:
                    found[turned.name] = self._copy(turned, wanted)
        return found

    def element_wise(
        self, op: Op, operands: Sequence[str | None], made: str
    ) -> Mapping[str, str | None]:
        """The operands that lie otherwise than the first, with names for their copies.

        Where tiles turn one over, the kernel reads it across; it has no copy.
        """
        found: dict[str, str | None] = {}
        for turned in self.orders.element_wise(op, operands, made):
            assert op.rule is not None
            wanted = turned.wanted(op.rule, self._on_gpu)
            copy = self._copy(turned, wanted) if wanted is not None else None
            found[turned.name] = copy
            if copy is not None:
                self.before[copy] = turned.copied
        return found

    def sent(self, name: str, dim: int) -> str | None:
        """A product's result as a collective that splits a dim sends it: that dim outermost.

            [a, b, 2]  --copy-->  [2, a, b]  --all-to-all-->  [2 a, b]

        A name for the copy, None for what lies so or is written as it is wished.
        """
        order = self.orders.begun_inside(name, dim)
        if order is None:
            return None
        wanted = (dim, *(d for d in order.dims if d != dim))
        return self._copy(Turned(0, name, order), wanted)

    def _copy(self, turned: Turned, wanted: Sequence[int]) -> str:
        """A name for a value that is written out in another order."""
        copy = f"{turned.copied} as {','.join(map(str, wanted))}"
        self.copies[copy] = turned.copied, tuple(wanted)
        if self._on_gpu and not turned.order.is_tiled(wanted):
            self.apart[copy] = turned.order.made
        return copy


def visited(
    outputs: Iterable[str | None], reads: Mapping[str, Sequence[str | None]]
) -> Mapping[str, int]:
    """The number of values a compiler visits before each: operands before results, the first first.

    XLA goes so through a computation from what it gives back, whatever order a program has. Work
    that a backward pass does once more may be visited before that which a program has before it.
    `reads` are the operands of what makes each value.
    """
    found: dict[str, int] = {}
    for output in outputs:
        waiting = [output] if output is not None else []
        opened = set[str]()
        while waiting:
            name = waiting[-1]
            if name in found or name in opened or name not in reads:
                found.setdefault(waiting.pop(), len(found))
                continue
            opened.add(name)
            waiting += [n for n in reversed(reads[name]) if n is not None]
    return found


def _wanted_by_product(rule: Rule, operand: int, side: int, order: Order) -> tuple[int, ...] | None:
    """The order in which a product takes an operand, None where it takes it as it lies.

    With one dim of batch XLA makes one dim of those that are kept, and one of those that are summed
    up, if they stand side by side in the value's own order, and takes the two either way: several
    products read one copy. Else the sums come last on the first side of a product, and first on the
    second, as it writes products.
    """
    sides = by_kind(order.dims, rule, operand)
    if _suits(sides, side):
        return None
    in_order = sorted(sides, key=lambda at: at[1])
    batches = sum(kind == 0 for kind, _ in sides)
    if batches == 1 and _suits(in_order, side):
        return tuple(d for _, d in in_order)
    wanted, other = _as_written(sides, side), _as_written(sides, 1 - side)
    if batches < 2 and not order.is_tiled(wanted):
        return other if order.is_tiled(other) or [*other] == sorted(other) else wanted
    return wanted


def _as_written(sides: Iterable[tuple[int, int]], side: int) -> tuple[int, ...]:
    """The dims of a product's operand as XLA writes them: on the first side the sums come last."""
    turn = -1 if side else 1
    return tuple(d for _, d in sorted(sides, key=lambda at: (turn * at[0] % 3, at[1])))


def _batch_of(rule: Rule) -> set[int]:
    left, right = (_long_factors(rule, dims) for dims in rule.operands[:2])
    return left & right & _long_factors(rule, rule.results[0])


def _long_factors(rule: Rule, dims: Sequence[Sequence[int]]) -> set[int]:
    return {f for dim in dims for f in dim if rule.factors[f].size > 1}


def _suits(sides: Sequence[tuple[int, int]], side: int) -> bool:
    """True if a product can take an operand as it lies.

    Batch dims come first, and the others in two runs of rising dims. Where there are several dims
    of batch, XLA makes one of those that are kept, or summed, before it turns the two runs over:
    a run of several dims stands where it wants it, sums last in the first operand.
    """
    inner = [pair for pair in sides if pair[0]]
    batches = len(sides) - len(inner)
    pairs = list(itertools.pairwise(inner))
    turns = sum(a[0] != b[0] for a, b in pairs)
    rising = all(a[1] < b[1] for a, b in pairs if a[0] == b[0])
    if sides[batches:] != inner or turns > 1 or not rising:
        return False
    rows = [side for side, _ in inner]
    if batches < 2 or max(rows.count(1), rows.count(2)) < 2:
        return True
    return rows == sorted(rows, reverse=side == 1)


def by_kind(dims: Iterable[int], rule: Rule, operand: int) -> list[tuple[int, int]]:
    """Dims of a product's operand, each behind 0 for batch, 1 for kept or 2 for summed."""
    batch, kept = _batch_of(rule), _long_factors(rule, rule.results[0])
    found = list[tuple[int, int]]()
    for d in dims:
        factors = {f for f in rule.operands[operand][d] if rule.factors[f].size > 1}
        found.append((0 if factors <= batch else 1 if factors <= kept else 2, d))
    return found


def _carried(order: Order, rule: Rule, operand: int) -> Order | None:
    """The order of a result that is computed in the order of an operand."""
    place = {f: d for d, dim in enumerate(rule.results[0]) for f in dim}
    dims: list[int] = []
    for d in order.dims:
        found = {place.get(f, -1) for f in rule.operands[operand][d] if rule.factors[f].size > 1}
        if len(found) != 1 or -1 in found or found & set(dims):
            return None
        dims += found
    return replace(order, dims=tuple(dims))
