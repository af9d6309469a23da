"""The reads and results of each instruction of a block, the order in which they lie, and fusions.

Only batched products fix the order of a value's dims in memory, as attention's do: the results of
all else lie as their readers wish. Element-wise work wants its operands to lie alike, and a product
wants the dims that it sums over, and those that it keeps, side by side; what does not is written
out in another order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster.chip import Platform
from autopar.cost import fusion
from autopar.ir.graph import Op
from autopar.ir.rule import Rule
from autopar.ir.spmd import Block, Fence, Instruction, LocalOp, Loop, Move
from autopar.ir.values import Literal

# -- in which order dims lie -----------------------------------------------------------------------


# What the two operands of a product are written out as, where they have to be.
_ORDERS = ("sums last", "sums first")


@dataclass(frozen=True, slots=True)
class _Order:
    """Dims longer than one, the slowest first, and how late the product is that they come from."""

    dims: tuple[int, ...]
    product: int


class Layouts:
    """Follows the orders of values through a block."""

    def __init__(self) -> None:
        self._orders: dict[str, _Order] = {}
        self._products = 0

    @property
    def any(self) -> bool:
        """True if an order is fixed."""
        return bool(self._orders)

    def product(self, op: Op, operands: Sequence[str | None], made: str) -> Mapping[str, str]:
        """Operands that a product wants in another order, with names for them in that order.

        Notes how the result of a batched product lies.
        """
        rule = op.rule
        if rule is None:
            return {}
        left, right = (_long_factors(rule, dims) for dims in rule.operands[:2])
        kept = _long_factors(rule, rule.results[0])
        batch = left & right & kept
        if batch:
            self._products += 1
            dims = tuple(d for d, size in enumerate(op.results[0].shape) if size > 1)
            self._orders[made] = _Order(dims, self._products)
        given = [(k, name) for k, name in enumerate(operands) if name in self._orders and name]
        return {
            name: f"{name} {_ORDERS[k]}"
            for k, name in given
            if not _suits(self._orders[name], rule, k, batch, kept)
        }

    def element_wise(self, op: Op, operands: Sequence[str | None], made: str) -> str | None:
        """The operand that is written out because it lies otherwise; notes how the result lies.

        That of the latest product gives way to that of the earliest.
        """
        rule, orders = op.rule, self._orders
        given = [(k, name) for k, name in enumerate(operands) if name in orders and name]
        if rule is None or not given:
            return None
        known = [(_carried(orders[name], rule, k), name) for k, name in given]
        lies = [(order, name) for order, name in known if order is not None]
        if not lies:
            return None
        first = min(lies, key=lambda found: found[0].product)[0]
        last, name = max(lies, key=lambda found: found[0].product)
        orders[made] = first
        if first.dims == last.dims:
            return None
        del orders[name]
        return name


def _long_factors(rule: Rule, dims: Sequence[Sequence[int]]) -> set[int]:
    return {f for dim in dims for f in dim if rule.factors[f].size > 1}


def _suits(order: _Order, rule: Rule, operand: int, batch: set[int], kept: set[int]) -> bool:
    """True if batch dims come first, and the others in two runs of rising dims."""
    sides = list[tuple[int, int]]()
    for d in order.dims:
        factors = {f for f in rule.operands[operand][d] if rule.factors[f].size > 1}
        sides.append((0 if factors <= batch else 1 if factors <= kept else 2, d))
    inner = [pair for pair in sides if pair[0]]
    pairs = list(itertools.pairwise(inner))
    turns = sum(a[0] != b[0] for a, b in pairs)
    rising = all(a[1] < b[1] for a, b in pairs if a[0] == b[0])
    return sides[len(sides) - len(inner) :] == inner and turns <= 1 and rising


def _carried(order: _Order, rule: Rule, operand: int) -> _Order | None:
    """The order of a result that is computed in the order of an operand."""
    place = {f: d for d, dim in enumerate(rule.results[0]) for f in dim}
    dims: list[int] = []
    for d in order.dims:
        found = {place.get(f, -1) for f in rule.operands[operand][d] if rule.factors[f].size > 1}
        if len(found) != 1 or -1 in found or found & set(dims):
            return None
        dims += found
    return _Order(tuple(dims), order.product)


# -- what is read ----------------------------------------------------------------------------------


OpOf = Callable[[tuple[int, ...]], Op]


@dataclass
class Line:
    """A block's instructions, by index: their ops, and what they read and make.

    A `fused` one may be computed in its readers. `loaded` are pieces that something reads from
    memory, or that the block returns. `copied` are those that an instruction reads in another
    order than they lie in, with names for the copies. Work is fused `into_products` on a TPU.
    """

    into_products: bool = False
    ops: list[Op | None] = field(default_factory=list[Op | None])
    reads: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    makes: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    fused: list[bool] = field(default_factory=list[bool])
    readers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    maker: dict[str, int] = field(default_factory=dict[str, int])
    loaded: set[str] = field(default_factory=set[str])
    copied: dict[int, Mapping[str, str]] = field(default_factory=dict[int, Mapping[str, str]])


def read_line(block: Block, op_of: OpOf, platform: Platform) -> Line:
    """Reads a block in one pass; `op_of` looks up the op of an instruction."""
    line, layouts = Line(into_products=platform == "tpu"), Layouts()
    for i, step in enumerate(block.instructions):
        op = None if isinstance(step, Move | Fence) else op_of(step.equation)
        reads, makes = _read_and_made(step)
        line.ops.append(op)
        line.reads.append(reads)
        line.makes.append(makes)
        if isinstance(step, LocalOp) and op is not None:
            line.fused.append(fusion.is_fused_into_readers(op))
            line.loaded.update(_read_from_memory(line, layouts, i, step, op))
        else:
            line.fused.append(isinstance(step, Move) and _is_local(step))
            if not line.fused[i]:
                line.loaded.update(reads)
        for name in reads:
            line.readers[name].append(i)
        for name in makes:
            line.maker[name] = i
    line.loaded.update(o for o in block.outputs if o is not None)
    _scatter_into_sums(line)
    return line


def _read_and_made(step: Instruction) -> tuple[Sequence[str], Sequence[str]]:
    if isinstance(step, LocalOp | Loop):
        return tuple(o for o in step.operands if o is not None), step.results
    if isinstance(step, Move):
        return (step.source,), (step.result,)
    return step.sources, step.results


def _is_local(move: Move) -> bool:
    return all(s.kind in ("slice", "mask") for s in move.steps)


def _read_from_memory(
    line: Line, layouts: Layouts, i: int, run: LocalOp, op: Op
) -> Sequence[str] | set[str]:
    """The values that must be stored for a run: those that it does not compute itself."""
    if line.fused[i]:
        stored = layouts.element_wise(op, run.operands, run.results[0]) if layouts.any else None
        return () if stored is None else (stored,)
    if fusion.is_reduction(op) or (line.into_products and fusion.is_product(op)):
        return ()
    if fusion.is_scatter(op):  # it computes what it puts, and puts it into what is there
        return line.reads[i][:1] if run.operands[0] is not None else ()
    if op.kind == "conv_general_dilated":
        return set(line.reads[i]) - _laid_out_filter(line, i, op, run)
    if op.kind == "dot_general":
        copied = layouts.product(op, run.operands, run.results[0])
        if copied:
            line.copied[i] = copied
            return set(line.reads[i]) - copied.keys()
    return line.reads[i]


def _laid_out_filter(line: Line, i: int, op: Op, run: LocalOp) -> set[str]:
    """Filters are read in an order of their own, and in that again for the input's gradient.

    That one reads them turned round, which the kernel does itself.
    """
    filters = run.operands[1]
    if filters is None or not fusion.has_filter(op):
        return set()
    at = line.maker.get(filters)
    turns = line.ops[at] if at is not None else None
    if at is None or turns is None or turns.kind != "rev":
        at, original = i, filters
    else:
        original = line.reads[at][0]
    line.copied[at] = {original: f"{original} as filters"}
    return {filters}


def _scatter_into_sums(line: Line) -> None:
    """A scatter into zeros that is only added to something scatters into that instead."""
    for i, op in enumerate(line.ops):
        if op is None or not fusion.is_scatter(op):
            continue
        sums = _only_reader(line, line.makes[i][0])
        zeros = line.maker.get(line.reads[i][0], -1)
        if sums is None or zeros < 0 or not _is_zeros(line.ops[zeros]):
            continue
        adds = line.ops[sums]
        lonely = _only_reader(line, line.reads[i][0], but_loaded=True) is not None
        if lonely and adds is not None and adds.kind in fusion.ADDITIONS:
            line.fused[i], line.fused[sums] = True, False
            line.loaded.difference_update(line.makes[zeros])
            line.loaded.update(r for r in line.reads[sums] if r not in line.makes[i])


def _only_reader(line: Line, name: str, but_loaded: bool = False) -> int | None:
    """The one instruction that reads a piece which nothing else wants."""
    readers = line.readers.get(name, ())
    if len(readers) != 1 or (name in line.loaded and not but_loaded):
        return None
    return readers[0]


def _is_zeros(op: Op | None) -> bool:
    if op is None or op.kind != "broadcast_in_dim":
        return False
    filled = op.operands[0]
    return isinstance(filled, Literal) and filled.text in ("0", "0.0", "-0.0")
