"""A block's listing as the kernels that a compiler makes of it: what each loads and stores.

1. The reads and results of each instruction, and which of them are written out in another order.
   Element-wise work may read operands that do not lie alike, but no sum is fused with it then.
2. Kernels. Element-wise work is left out of memory where computing it again in its readers moves
   fewer bytes than storing it, so a kernel reads the stored pieces behind everything that is fused
   into it. Which ops those are, and which compute what they read, is as XLA's compilers for GPUs
   and TPUs have it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autopar.cluster.chip import Platform
from autopar.cost.layouts import Layouts, Orders, visited, wasted_bytes
from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import (
    Block,
    Fence,
    Listing,
    ListingStep,
    LocalOp,
    Loop,
    Move,
    names_made,
    names_read,
)
from autopar.ir.rule import Rule
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Literal, Value, item_bytes
from autopar.rules import Fusion, primitive
from autopar.rules.primitive import fields, ints, pairs

# -- fusion ----------------------------------------------------------------------------------------

# A scatter into zeros that is added to something may put its items there instead.
ADDITIONS = frozenset({"add", "add_any"})

# A matrix product with fewer tiles than the chip has cores is cut along its sum into parts, whose
# results, in f32, are added up afterwards.
_TILE_ITEMS, _TILES_WANTED, _LEAST_SUM, _PART_BYTES = 128 * 128, 128, 128, 4


# BLAS multiplies matrices of 2-byte numbers in tensor cores, by so many rows and columns at once.
_HALVES, _AT_ONCE = frozenset({"bf16", "f16"}), 8

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


def is_scatter(op: Op) -> bool:
    """True if the op puts items into what is there."""
    return primitive(op.kind).fusion is Fusion.SCATTER


def operand_shape(op: Op, operand: int) -> tuple[int, ...]:
    """The shape of an op's operand on all devices; () where its rule does not tell."""
    rule = op.rule
    if rule is None or operand >= len(rule.operands):
        return ()
    return tuple(math.prod(rule.factors[f].size for f in dim) for dim in rule.operands[operand])


def group_count(op: Op) -> int:
    """The number of groups that the rows of a product come in; 1 for all but ragged products."""
    if op.kind != "ragged_dot_general" or op.rule is None:
        return 1
    return math.prod(op.rule.factors[f].size for f in op.rule.operands[2][-1])


def has_filter(op: Op) -> bool:
    """True if a convolution slides a filter: it has no more taps than the result has places.

    For a filter's own gradient, the gradient of what it made is slid to as few places as it has.
    """
    numbers = fields(op.param("dimension_numbers"))
    slid, made = operand_shape(op, 1), op.results[0].shape
    if not slid:
        return False
    taps = math.prod(slid[d] for d in ints(numbers["rhs_spec"])[2:])
    return taps <= math.prod(made[d] for d in ints(numbers["out_spec"])[2:])


def _features(op: Op) -> int:
    """The dim of a convolution's result that the second operand makes."""
    return ints(fields(op.param("dimension_numbers"))["out_spec"])[1]


def padded_share(op: Op) -> float:
    """The size of the image that a convolution reads, padded, over that of the one it is given.

    It is 1 if the kernel pads it itself: as much on either side.
    """
    padding = pairs(op.param("padding"))
    image = operand_shape(op, 0)
    if not image or all(low == high for low, high in padding):
        return 1.0
    at = ints(fields(op.param("dimension_numbers"))["lhs_spec"])[2:]
    share = 1.0
    for d, (low, high), apart in zip(at, padding, op.ints("lhs_dilation"), strict=True):
        share *= ((image[d] - 1) * apart + 1 + low + high) / image[d]
    return share


def _is_run_backward(op: Op) -> bool:
    """True for the gradient of the input of a convolution with strides, which cuDNN has a call for.

    Where features come in groups XLA for GPUs writes it as a convolution, of inputs that lie apart.
    """
    is_apart = any(apart > 1 for apart in op.ints("lhs_dilation"))
    return is_apart and op.whole("feature_group_count") == 1 and has_filter(op)


def _made_share(op: Op) -> float:
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


def _padding(op: Op) -> str:
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
    summed = _terms_of_product(op)
    if summed is None:
        return 0
    length = math.prod(sizes[d] for d in summed)
    parts = 1
    while parts * tiles < _TILES_WANTED and length // (2 * parts) >= _LEAST_SUM:
        parts *= 2
    return parts * item_count * _PART_BYTES if parts > 1 else 0


def sums_up_batches(op: Op) -> bool:
    """True if the op is a matrix product with a dim of batch."""
    return op.kind == "dot_general" and op.rule is not None and _terms_of_product(op) is None


def _terms_of_product(op: Op) -> tuple[int, ...] | None:
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


# -- what is read ----------------------------------------------------------------------------------


Fill = tuple[str, str, tuple[int, ...]]  # a number that is everywhere, its dtype and the shape


@dataclass(frozen=True)
class ByGroups:
    """A copy of rows for each group, with zeros for those of others, by the groups' sizes.

    It has the groups outermost, or in front of the terms: that is `turned` from the former, where
    there is such a copy.
    """

    count: int
    sizes: str | None
    shape: tuple[int, ...]
    turned: str | None = None


@dataclass
class Line:
    """A block's instructions, by index: their ops, and what they read and make.

    A `fused` one may be computed in its readers. `loaded` are pieces that something reads from
    memory, or that the block returns. `copied` are those that an instruction reads in another order
    than they lie in, with names for the copies. Work is fused `into_products` on a TPU. `turned`
    are gathers whose results the block gives back in another order than they arrive in. Of other
    results some are `lying_turned` when they are given back: the kernels that make them turn them
    over. `copies` are those that are only `copied` in another order, with the value and the order.
    `transposed` is element-wise work on values that do not lie alike: a kernel of its own reads
    them across, as one that sums cannot. What an all-to-all joined lies `in_parts`, by name with
    the dim, as does what is made of such alone: a sum takes it as it lies, but with anything else
    it is read across. Where a smaller value is spread `over_parts`, only a sum along that dim does.
    What has `one_a_row`, by name with the number of rows, are sums over short rows and what is made
    of them; `with_sums` is what is computed of rows with their sums, as a softmax is, by Triton.
    Copies whose items are loaded `apart`, by name, come with the product's results that they are
    made from, and so do those that stand `before` what is computed of such a result. Copies of
    images, and of what products read, are `padded` to so many times their size, and so are results
    of products and convolutions by their own names; rows are `grouped`, by the names of their
    copies. Those that read a number that a scatter finds everywhere, too, load it: `filled` are
    they, with the names of what is loaded, and `fills` the number, its dtype and the shape of each
    of these. Of each instruction it is told if anyone wants it, and the `roots`: into which kernels
    it may be fused, as bits of a number, kernel j's being bit j, and copies' those behind; it is 0
    where the result is stored in any case.
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
    turned: set[int] = field(default_factory=set[int])
    lying_turned: frozenset[str] = frozenset()
    transposed: set[str] = field(default_factory=set[str])
    in_parts: dict[str, int] = field(default_factory=dict[str, int])
    over_parts: set[str] = field(default_factory=set[str])
    one_a_row: dict[str, int] = field(default_factory=dict[str, int])
    with_sums: set[str] = field(default_factory=set[str])
    copies: Mapping[str, tuple[str, tuple[int, ...]]] = field(
        default_factory=dict[str, tuple[str, tuple[int, ...]]]
    )
    apart: dict[str, str] = field(default_factory=dict[str, str])
    before: dict[str, str] = field(default_factory=dict[str, str])
    padded: dict[str, float] = field(default_factory=dict[str, float])
    grouped: dict[str, ByGroups] = field(default_factory=dict[str, ByGroups])
    filled: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    fills: dict[str, Fill] = field(default_factory=dict[str, Fill])
    visits: Mapping[str, int] = field(default_factory=dict[str, int])
    orders: Orders = field(default_factory=lambda: Orders({}))
    alive: list[bool] = field(default_factory=list[bool])
    roots: list[int] = field(default_factory=list[int])


def read_line(block: Block, sizes: Sizes) -> Line:
    """Reads a block in one pass, and back once more for what is wanted of it."""
    line = Line(into_products=sizes.platform == "tpu")
    visits: Mapping[str, int] = {}
    if not line.into_products:  # a product on a TPU takes what it reads in any order
        operands = {made: names_read(s) for s in block.instructions for made in names_made(s)}
        visits = visited(block.outputs, operands)
    ops = [
        None if isinstance(step, Move | Fence) else sizes.op(step.equation)
        for step in block.instructions
    ]
    turned_over = {
        step.operands[0]
        for step, op in zip(block.instructions, ops, strict=True)
        if isinstance(step, LocalOp) and op is not None and op.kind == "transpose"
    }
    layouts = Layouts(visits, sizes.platform, turned_over)
    for i, (step, op) in enumerate(zip(block.instructions, ops, strict=True)):
        reads = tuple([name for name in names_read(step) if name is not None])
        makes = names_made(step)
        line.ops.append(op)
        line.reads.append(reads)
        line.makes.append(makes)
        if isinstance(step, Fence):
            for source, name in zip(step.sources, step.results, strict=True):
                layouts.orders.renamed(source, name)
        if isinstance(step, LocalOp) and op is not None:
            if op.kind == "sharding_constraint" and step.operands[0] is not None:
                layouts.orders.renamed(step.operands[0], step.results[0])
            line.fused.append(is_fused_into_readers(op))
            _along_rows(line, sizes, i, step, op)
            line.loaded.update(_read_from_memory(line, layouts, sizes, i, step, op))
        else:
            line.fused.append(isinstance(step, Move) and _is_local(step))
            if isinstance(step, Loop):
                line.loaded.update(_read_by_loop(line, step, op))
            elif not line.fused[i]:
                line.loaded.update(reads)
            if sizes.platform == "gpu" and isinstance(step, Move):
                _laid_out_by_move(line, layouts, sizes, i, step)
        for name in reads:
            line.readers[name].append(i)
        for name in makes:
            line.maker[name] = i
    returned = [o for o in block.outputs if o is not None]
    line.loaded.update(returned)
    if sizes.platform == "gpu":
        makers = {o: line.maker[o] for o in returned if o in line.maker}
        line.turned = {
            i for i in makers.values() if _joins_inside(block.instructions[i], "all-gather")
        }
        line.lying_turned = frozenset(
            o for o, i in makers.items() if line.fused[i] and layouts.orders.is_turned(o)
        )
    for copy, made in line.grouped.items():
        if made.turned not in line.grouped:
            line.grouped[copy] = replace(made, turned=None)
    _scatter_into_sums(line)
    if sizes.platform == "gpu":
        _read_filled(line, block, sizes)
    line.apart, line.before, line.orders = layouts.apart, layouts.before, layouts.orders
    line.copies = layouts.copies
    if sizes.platform == "gpu":
        line.visits = visits
    _find_roots(line, set(returned))
    return line


def _read_by_loop(line: Line, loop: Loop, op: Op | None) -> Iterator[str]:
    """The values that must be stored for a loop.

    A constant of the loop that is one number in every place is none of them: XLA makes it in the
    body, out of nothing, where it is read (WhileLoopConstantSinking).
    """
    flow = None if op is None else op.control_flow
    constants = () if flow is None or flow.kind == "cond" else flow.operands
    for o, port in itertools.zip_longest(loop.operands, constants):
        if o is None:
            continue
        is_constant = port is not None and port.kind is PortKind.CONSTANT
        if not (is_constant and _is_filled(line, o)):
            yield o


def _is_filled(line: Line, name: str) -> bool:
    """True if a literal, or a cast of one, was broadcast to a value, which may be a piece of it."""
    at = line.maker.get(name)
    while at is not None:
        op = line.ops[at]
        if op is None and not line.fused[at]:  # a collective, or a fence
            return False
        if op is not None and op.kind not in _FILLING:
            return False
        if op is not None and isinstance(op.operands[0], Literal):
            return True
        at = line.maker.get(line.reads[at][0])
    return False


_FILLING = frozenset({"broadcast_in_dim", "convert_element_type"})


def _laid_out_by_move(line: Line, layouts: Layouts, sizes: Sizes, i: int, move: Move) -> None:
    """Notes how a move's result lies, and if what it sends is written in another order first."""
    if _joins_inside(move, "all-to-all"):
        line.in_parts[move.result] = move.steps[-1].dim
    if _joins_inside(move, "all-gather"):
        local = sizes.local(move.after, move.value.shape)
        layouts.orders.gathered(move.result, move.steps[-1].dim, local)
    if all(step.kind == "all-reduce" for step in move.steps):
        layouts.orders.renamed(move.source, move.result)
    if move.steps and move.steps[0].kind == "all-to-all":
        sent = layouts.sent(move.source, move.steps[0].to_dim)
        if sent is not None:
            line.copied[i] = {move.source: sent}


def _joins_inside(step: ListingStep, kind: str) -> bool:
    """True for a move that ends in a collective of this kind along a dim that is not the first.

    XLA for GPUs gathers along the dim that lies outermost. A product reads that as it lies, but
    what a program gives back lies in the order of its dims, and is written once more. What an
    all-to-all joins lies one device's part behind another's, which is the order of no dims:

        [a, b/2] [a, b/2]  --all-gather-->  [b, a]  --copy-->  [a, b]
        [a, b/2] [a, b/2]  --all-to-all-->  [2, a/2, b/2]  for  [a/2, b]
    """
    if not isinstance(step, Move) or not step.steps or step.steps[-1].kind != kind:
        return False
    return any(n > 1 for n in step.value.shape[: step.steps[-1].dim])


def _is_local(move: Move) -> bool:
    return all(s.kind in ("slice", "mask") for s in move.steps)


def _read_from_memory(
    line: Line, layouts: Layouts, sizes: Sizes, i: int, run: LocalOp, op: Op
) -> Sequence[str] | set[str]:
    """The values that must be stored for a run: those that it does not compute itself."""
    if line.fused[i]:
        otherwise: Mapping[str, str | None] = {}
        if layouts.orders.any:
            otherwise = layouts.element_wise(op, run.operands, run.results[0])
        copies = {name: copy for name, copy in otherwise.items() if copy is not None}
        if copies:
            line.copied[i] = copies
        if not line.in_parts.keys().isdisjoint(line.reads[i]):
            _read_in_parts(line, i, run, op)
        across = line.transposed.intersection(line.reads[i]) - line.loaded - copies.keys()
        if across or len(copies) < len(otherwise):
            line.transposed.update(line.makes[i])
        return ()
    if is_reduction(op):
        across = line.transposed.intersection(line.reads[i])
        for k, name in enumerate(run.operands):
            if name in line.over_parts and _dim_made(op, k, line.in_parts[name]) is None:
                across.add(name)
        return {_before_casts(line, n) for n in across}
    if line.into_products and is_product(op):
        return ()
    if is_scatter(op):  # it computes what it puts, and puts it into what is there
        return line.reads[i][:1] if run.operands[0] is not None else ()
    if op.kind == "conv_general_dilated":
        apart = _laid_out_filter(line, i, op, run)
        image, share = run.operands[0], padded_share(op)
        if sizes.platform == "gpu" and _is_run_backward(op):
            line.padded[run.results[0]] = _made_share(op)
        elif sizes.platform == "gpu" and image is not None and share > 1:
            copy = f"{image} padded by {_padding(op)}"
            line.copied[i] = {**line.copied.get(i, {}), image: copy}
            line.padded[copy] = share
            apart.add(image)
        return set(line.reads[i]) - apart
    if op.kind == "ragged_dot_general" and sizes.platform == "gpu":
        line.copied[i] = dict(_by_groups(line, sizes, run, op))
        return set(line.reads[i]) - line.copied[i].keys()
    if op.kind == "dot_general":
        local = sizes.local(run.result_shardings[0], op.results[0].shape)
        copied = dict(layouts.product(op, run.operands, run.results[0], local))
        if sizes.platform == "gpu":
            copied.update(_padded_operands(line, layouts, sizes, run, op, copied))
        if copied:
            line.copied[i] = copied
            by_triton = {n for n, copy in copied.items() if copy in line.padded} & line.with_sums
            return set(line.reads[i]) - (copied.keys() - by_triton)
    return line.reads[i]


def _along_rows(line: Line, sizes: Sizes, i: int, run: LocalOp, op: Op) -> None:
    """Notes what is one for each row, and what is computed of rows with that."""
    if not op.results:
        return
    reads = line.reads[i]
    made, items = run.results[0], math.prod(sizes.made(run, op))
    if line.fused[i]:
        spreads = any(line.one_a_row.get(name, items) != items for name in reads)
        if spreads or not line.with_sums.isdisjoint(set(reads) - line.loaded):
            line.with_sums.add(made)
        elif not line.one_a_row.keys().isdisjoint(reads):
            line.one_a_row[made] = items
        return
    summed, shape = summed_dims(op), sizes.shard(run, op)
    if summed and summed == (len(shape) - 1,) and shape[-1] <= LONGEST_ROW and items > 1:
        line.one_a_row[made] = items


def _read_in_parts(line: Line, i: int, run: LocalOp, op: Op) -> None:
    """Notes how that lies which is computed of what an all-to-all joined.

    With a smaller value, that is spread over it, it lies in parts still. A sum along the joined dim
    cannot read that: it would spread the value, as the highest of each row is, over each part.
    """
    joined = [(k, n) for k, n in enumerate(run.operands) if n in line.in_parts]
    others = set(line.reads[i]) - {n for _, n in joined}
    k, name = joined[0]
    dim = _dim_made(op, k, line.in_parts[name])
    is_spread = all(_is_spread(line, op, n) for n in others)
    for made in line.makes[i]:
        if not is_spread or (others and dim is None):
            line.transposed.add(made)
            continue
        line.in_parts[made] = -1 if dim is None else dim
        if others or any(n in line.over_parts for _, n in joined):
            line.over_parts.add(made)


def _dim_made(op: Op, operand: int, dim: int) -> int | None:
    """The dim of an op's result that goes with one of an operand, None where none is known."""
    if op.rule is None or dim < 0:
        return None
    factor = op.rule.major(op.rule.operands[operand][dim])
    return next((d for d, there in enumerate(op.rule.results[0]) if factor in there), None)


def _is_spread(line: Line, op: Op, name: str) -> bool:
    """True if a smaller value is spread over what an op makes."""
    made = line.ops[line.maker[name]] if name in line.maker else None
    if made is None:
        return False
    items, results = (math.prod(o.results[0].shape) for o in (made, op))
    return made.kind == "broadcast_in_dim" or items < results


def _padded_operands(
    line: Line, layouts: Layouts, sizes: Sizes, run: LocalOp, op: Op, copied: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The operands of a product that are written out padded, with names for the copies.

    XLA for GPUs pads matrices of 2-byte numbers until tensor cores take their rows and columns
    (CublasPadForGemms), and so has the product make more than is read of it. Products that take a
    matrix in one order share its copy.
    """
    dims = product_dims(op, run, sizes) if sizes.dtype(op.operands[0]) in _HALVES else None
    if dims is None or min(dims[1:3]) == 1 or not any(size % _AT_ONCE for size in dims[1:]):
        return
    assert op.rule is not None
    rows, columns, terms = (-(-size // _AT_ONCE) * _AT_ONCE / size for size in dims[1:])
    line.padded[run.results[0]] = rows * columns
    shares = rows * terms, terms * columns
    for k, (name, share) in enumerate(zip(run.operands, shares, strict=True)):
        if name is not None and share > 1:
            order = layouts.orders.taken(op.rule, k, name, run.results[0])
            copy = f"{copied.get(name, name)} padded as {','.join(map(str, order))}"
            line.padded[copy] = share
            yield name, copy


def _by_groups(line: Line, sizes: Sizes, run: LocalOp, op: Op) -> Iterator[tuple[str, str]]:
    """The rows that a product takes once for each group, with names for the copies.

    A product that sums up over the groups takes them with the terms:

        [rows, terms]  -->  [groups, rows, terms]  -->  [rows, groups, terms]

    One that does not, as the gradient of what the groups have, sums up over rows, and takes those
    of both sides as they are copied first.
    """
    assert op.rule is not None
    sums, count = op.rule.operands[2][-1] not in op.rule.results[0], group_count(op)
    for k in (0,) if sums else (0, 1):
        name, groups = run.operands[k], run.operands[2]
        if name is None:
            continue
        shape, whole = sizes.shard(run, op, k), f"{name} by groups of {groups}"
        if sums:
            copy, shape = f"{whole}, by terms", (*shape[:-1], count, *shape[-1:])
            line.grouped[copy] = ByGroups(count, groups, shape, whole)
        else:
            copy, line.grouped[whole] = whole, ByGroups(count, groups, (count, *shape))
        yield name, copy


def _before_casts(line: Line, name: str) -> str:
    """The value of which one that is read across is a cast, which is the smaller of the two."""
    at = line.maker[name]
    op, reads = line.ops[at], line.reads[at]
    if op is None or op.kind != "convert_element_type":
        return name
    if reads[0] not in line.transposed and reads[0] not in line.over_parts:
        return name
    return _before_casts(line, reads[0])


def _laid_out_filter(line: Line, i: int, op: Op, run: LocalOp) -> set[str]:
    """Filters are read in an order of their own, and in that again for the input's gradient.

    That one reads them turned round, which the kernel does itself.
    """
    filters = run.operands[1]
    if filters is None or not has_filter(op):
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
        if op is None or not is_scatter(op):
            continue
        sums = _only_reader(line, line.makes[i][0])
        zeros = line.maker.get(line.reads[i][0], -1)
        if sums is None or zeros < 0 or not _is_zeros(line.ops[zeros]):
            continue
        adds = line.ops[sums]
        lonely = _only_reader(line, line.reads[i][0], but_loaded=True) is not None
        if lonely and adds is not None and adds.kind in ADDITIONS:
            line.fused[i], line.fused[sums] = True, False
            line.loaded.difference_update(line.makes[zeros])
            line.loaded.update(r for r in line.reads[sums] if r not in line.makes[i])


def _read_filled(line: Line, block: Block, sizes: Sizes) -> None:
    """Notes what loads a number that fills a buffer which others write into.

    To XLA the two are one value, of which those get copies; see `Line.filled`. What is computed of
    numbers alone, and what adds zeros, is computed before.

        z = zeros    g = scatter(z, i, u)    p' = p - where(p > 0, g, 0)    loads p, g and z
    """
    numbers: dict[str, Literal] = {}  # what is one everywhere, its text "" if it is not known
    read: list[tuple[int, Fill]] = []
    written = set[Fill]()
    for i, (step, op) in enumerate(zip(block.instructions, line.ops, strict=True)):
        if not line.fused[i] or not isinstance(step, LocalOp) or op is None:
            continue
        given = [
            numbers.get(name) if name is not None else operand
            for name, operand in zip(step.operands, op.operands, strict=True)
        ]
        known = [n for n in given if isinstance(n, Literal) and not n.shape]
        made, shape, dtype = step.results[0], sizes.made(step, op), op.results[0].dtype
        if known and len(known) == len(given):
            text = known[0].text if op.kind in _FILLING else ""
            numbers[made] = Literal(text, dtype)
            if made in line.loaded:
                written.add(filled_with(numbers[made], shape))
        elif op.rule is not None and op.rule.is_elementwise:
            adds = op.kind in ADDITIONS or op.kind == "sub"
            read += [(i, filled_with(n, shape)) for n in known if not (adds and n.is_zero)]
    for i, fill in read:
        if fill in written and fill[0]:
            name = "{} in {}{}".format(*fill)
            line.fills[name] = fill
            line.filled.setdefault(i, []).append(name)


def filled_with(number: Literal, shape: tuple[int, ...]) -> Fill:
    """A number that is everywhere in a shape."""
    return "0" if number.text == "0.0" else number.text, number.dtype, shape


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


Pieces = frozenset[str]
_NONE: Pieces = frozenset()
# The more kernels compute a piece, the less it pays: beyond so many, counting is not worth while.
_READERS = 6
# What stands between a product and the end of gelu, and how many times larger than biases it is.
_IN_GELU = frozenset(
    "add broadcast_in_dim convert_element_type integer_pow mul reshape tanh".split()
)
_LARGER = 16
_TURNING = frozenset({"reshape", "transpose"})
_MASK = "mask"
_PLACE_BYTES = 4  # of one of an iota's places, whatever it is cast to
# Of DeepSeek's scores on v5p those of 512 MiB in f32 are computed once more, and four of their sums
# run as one; those of 8 GiB are not.
LARGE_ON_TPU_BYTES = 2**30


COPY, OUTSIDE, ADDING, FILL = -1, -2, -3, -4  # in place of an instruction's index


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: pieces that it makes and reads, and scratch that lives as long as it runs.

    `at` is its instruction's index in the block, or below 0 for what is no instruction: a `COPY`,
    be it in another order or what a loop cuts out, what runs `OUTSIDE` its loop, the `ADDING` of
    the one piece that it reads to a sum, and the `FILL` of a piece with one number. Of a move of
    several collectives each is a kernel, `part` its number. `group` are the kind, axes and dtype of
    a collective that may be combined with its like, the dtype "" of gathers, which may be of
    several. A light one may be fused with others that read the same, such as one that `picks` items
    of what it reads, but for what Triton runs `alone`; an early one need not wait for its readers'
    turn: it gathers. `wasted_bytes` are loaded beside those that it reads, where it loads them item
    by item; `work_bytes` could be loaded while it computes.
    """

    at: int
    makes: tuple[str, ...]
    reads: Pieces
    scratch_bytes: int = 0
    in_place: bool = False
    group: tuple[str, tuple[str, ...], str] | None = None
    moved_bytes: int = 0
    is_light: bool = False
    picks: bool = False
    alone: bool = False
    is_early: bool = False
    wasted_bytes: int = 0
    work_bytes: float = 0.0
    part: int = 0

    def instruction(self, block: Block) -> ListingStep | None:
        """The instruction of its block that it runs; None where it is none."""
        return block.instructions[self.at] if self.at >= 0 else None


@dataclass(frozen=True)
class Stored:
    """The kernels of a block in order, the bytes of every stored piece, and what lives on.

    `behind` are the pieces that stand for the block's outputs and for the operands of its loops.
    `visits` number values as a compiler visits them from the outputs on; kernels that are none of
    the block's come with their `operands` in that order, by the first piece that they make. Where
    the compiler `gives_tuples`, what is no result of element-wise work alone comes in one.
    """

    kernels: tuple[Kernel, ...]
    nbytes: Mapping[str, int]
    kept: Pieces  # pieces behind the block's outputs
    behind: Mapping[str, Pieces] = field(default_factory=dict[str, Pieces])
    visits: Mapping[str, int] = field(default_factory=dict[str, int])
    operands: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    gives_tuples: bool = False

    def read_by(self, kernel: Kernel) -> list[str]:
        """The pieces that a kernel reads, those that a compiler visits first in front."""
        found = list[str]()
        for name in kernel.makes:
            found += self.operands.get(name, ())
        known = {*found}
        return found + sorted(kernel.reads - known, key=self._visit)

    def _visit(self, name: str) -> tuple[int, str]:
        at = self.visits.get(name)
        return self.visits.get(name.split(" ", 1)[0], -1) if at is None else at, name


class Sizes:
    """Looks up ops and weighs pieces on one mesh of devices of a platform.

    Blocks, and their kernels, are kept as they were read: what weighs a listing and what times it
    read it once.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, platform: Platform = "gpu") -> None:
        self._graph, self.mesh = graph, mesh
        self.platform: Platform = platform
        self._known: dict[tuple[tuple[int, ...], str, Sharding], int] = {}
        self._stored: list[tuple[Block, Mapping[str, int], Stored]] = []
        self._lines: list[tuple[Block, Line]] = []

    def line(self, block: Block) -> Line:
        """A block, as it was read before or now."""
        for known, line in self._lines:
            if known is block:
                return line
        line = read_line(block, self)
        self._lines.append((block, line))
        return line

    def stored(self, block: Block, given: Mapping[str, int], write: Callable[[], Stored]) -> Stored:
        """The kernels of a block without loops on such inputs, written where they are not known."""
        for known, lying, stored in self._stored:
            if known is block and lying == given:
                return stored
        stored = write()
        self._stored.append((block, dict(given), stored))
        return stored

    def of(self, value: Value, sharding: Sharding) -> int:
        """Bytes of one device's piece of a value."""
        key = (value.shape, value.dtype, sharding)
        found = self._known.get(key)
        if found is None:
            found = sharding.local_bytes(value, self.mesh)
            self._known[key] = found
        return found

    def inputs(self, program: Listing) -> dict[str, int]:
        """Bytes of one device's pieces of the step's arguments."""
        lying = zip(self._graph.inputs, program.input_shardings, strict=True)
        return {i.value.name: self.of(i.value, s) for i, s in lying}

    def dtype(self, operand: Operand) -> str:
        """The dtype of an op's operand."""
        if isinstance(operand, Literal):
            return operand.dtype
        return self._graph.nested_values[operand].dtype

    def op(self, path: tuple[int, ...]) -> Op:
        """The op that an instruction runs."""
        return self._graph.ops[path[0]] if len(path) == 1 else self._graph.op_at(path)

    def shard(self, run: LocalOp, op: Op, operand: int = 0) -> tuple[int, ...]:
        """The shape of the piece of an op's operand; () where its rule does not tell."""
        shape = operand_shape(op, operand)
        return self.local(run.operand_shardings[operand], shape) if shape else ()

    def made(self, run: LocalOp, op: Op) -> tuple[int, ...]:
        """The shape of the piece of an op's first result."""
        return self.local(run.result_shardings[0], op.results[0].shape)

    def local(self, sharding: Sharding, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a device's piece of a value."""
        return sharding.shard_shape(shape, self.mesh)


def product_dims(op: Op, run: LocalOp, sizes: Sizes) -> tuple[int, int, int, int] | None:
    """The batches, rows, columns and terms of each sum of a device's piece of a matrix product.

    Each group of a ragged one has terms, or columns, of its own. None for other ops.
    """
    if op.kind not in ("dot_general", "ragged_dot_general") or op.rule is None:
        return None
    right, kept = set(op.rule.operands[1]), set(op.rule.results[0])
    batches = rows = terms = 1
    if any(groups[-1] not in kept for groups in op.rule.operands[2:]):
        terms = group_count(op)
    for dim, size in zip(op.rule.operands[0], sizes.shard(run, op), strict=True):
        if dim not in kept:
            terms *= size
        elif dim in right:
            batches *= size
        else:
            rows *= size
    return batches, rows, math.prod(sizes.made(run, op)) // max(1, batches * rows), terms


InnerBytes = Callable[[Loop, Op, Mapping[str, int]], int]


def stored_kernels(
    block: Block,
    sizes: Sizes,
    given: Mapping[str, int],
    inner_bytes: InnerBytes,
    slices: Mapping[str, int] | None = None,
    stacked: Pieces = _NONE,
) -> Stored:
    """The kernels of a block.

    `given` are the bytes of the inputs that are held outside, `slices` those of inputs that a loop
    cuts out of them; `stacked` are outputs that a loop writes into place as they are made.
    `inner_bytes` says what the body of a loop holds at most.
    """
    looped = any(isinstance(step, Loop) for step in block.instructions)
    if not (looped or slices or stacked):
        return sizes.stored(block, given, lambda: _written(block, sizes, given, inner_bytes))
    return _written(block, sizes, given, inner_bytes, slices, stacked)


def _written(
    block: Block,
    sizes: Sizes,
    given: Mapping[str, int],
    inner_bytes: InnerBytes,
    slices: Mapping[str, int] | None = None,
    stacked: Pieces = _NONE,
) -> Stored:
    line = sizes.line(block)
    writer = _Writer(line, sizes, given, inner_bytes, stacked)
    for name, nbytes in (slices or {}).items():
        writer.cut(name, nbytes)
    for i, step in enumerate(block.instructions):
        if line.alive[i]:
            writer.visit(i, step, line.roots[i])
    return writer.stored(block)


def _find_roots(line: Line, wanted: Set[str]) -> None:
    """Notes what is wanted of a line whose block gives back some values, and its roots."""
    count = len(line.ops)
    line.alive, line.roots = [False] * count, [0] * count
    alive, roots, loaded, readers = line.alive, line.roots, line.loaded, line.readers
    copies: dict[str, int] = {}  # bits of kernels that write a value in another order
    for i in range(count - 1, -1, -1):
        fusible = line.fused[i]
        found, used = 0, False
        for m in line.makes[i]:
            used = used or m in wanted
            fusible = fusible and m not in loaded
            for j in readers.get(m, ()):
                if alive[j]:
                    used = True
                    copy = line.copied[j].get(m) if j in line.copied else None
                    if copy in line.grouped:
                        copy = line.grouped[copy].turned or copy
                    bit = j if copy is None else copies.setdefault(copy, count + len(copies))
                    found |= roots[j] or 1 << bit
        alive[i] = used
        if fusible:
            roots[i] = found


class _Joined:
    """Pieces behind some others, put together once they are asked for.

    Along a sum of many fused terms, as of a global norm, each term would copy those before it.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: _Behind) -> None:
        self.parts = parts

    def pieces(self) -> Pieces:
        """The pieces."""
        found: set[str] = set()
        seen: set[_Joined] = {self}
        waiting: list[_Joined] = [self]
        while waiting:
            for part in waiting.pop().parts:
                if not isinstance(part, _Joined):
                    found |= part
                elif part not in seen:
                    seen.add(part)
                    waiting.append(part)
        pieces = frozenset(found)
        self.parts = (pieces,)
        return pieces


_Behind = Pieces | _Joined
_FEW_BEHIND = 64  # that are put together at once


def _pieces(behind: _Behind) -> Pieces:
    return behind.pieces() if isinstance(behind, _Joined) else behind


def _joined(behind: Sequence[_Behind]) -> _Behind:
    count = 0
    for part in behind:
        count += _FEW_BEHIND + 1 if isinstance(part, _Joined) else len(part)
    if count > _FEW_BEHIND:
        return _Joined(*behind)
    return _NONE.union(*(part for part in behind if not isinstance(part, _Joined)))


class _Writer:
    """Goes through the instructions in order and writes a kernel for each that stores."""

    def __init__(
        self,
        line: Line,
        sizes: Sizes,
        given: Mapping[str, int],
        inner_bytes: InnerBytes,
        stacked: Pieces,
    ) -> None:
        self._line, self._sizes, self._inner_bytes = line, sizes, inner_bytes
        self._stacked = stacked
        self._nbytes: dict[str, int] = dict(given)
        self._behind: dict[str, _Behind] = {name: frozenset((name,)) for name in given}
        self._work: dict[str, float] = {}  # of a fused piece, in bytes
        # Of a fused piece, the bytes that are loaded of pieces from which something is picked.
        self._picked: dict[str, Mapping[str, int]] = {}
        # Of a fused piece, the instructions whose work takes time of its own, with its bytes.
        self._dear: dict[str, Mapping[int, float]] = {}
        self._epilogues: dict[str, str] = {}  # products' results, and what is made of them alone
        # What lies behind element-wise work, and its bytes, though it may be stored as well.
        self._computed: dict[str, tuple[_Behind, int]] = {}
        self._kernels: list[Kernel] = []
        self._written_at: dict[str, int] = {}  # of what element-wise work stores, its kernel
        # Of what no input leads to, a name that all that are computed alike have.
        self._of_nothing: dict[str, str] = {}
        self._equals: dict[Hashable, int] = {}
        self._makers: dict[str, Kernel] = {}  # of the first so many kernels, by what they make
        self._found_makers = 0

    def stored(self, block: Block) -> Stored:
        """The pieces that were written."""
        outputs = [o for o in block.outputs if o is not None]
        loops = (step for step in block.instructions if isinstance(step, Loop))
        asked = {*outputs, *(o for loop in loops for o in loop.operands if o is not None)}
        behind = {o: _pieces(self._behind.get(o, _NONE)) for o in asked}
        kept = _NONE.union(*(behind[o] for o in outputs))
        return Stored(
            tuple(self._with_epilogues(kept)), self._nbytes, kept, behind, self._line.visits,
            gives_tuples=self._sizes.platform == "gpu",
        )  # fmt: skip

    def cut(self, name: str, nbytes: int) -> None:
        """An input that a loop cuts out: element-wise readers do it themselves."""
        if name in self._line.loaded:
            self._nbytes[name] = nbytes
            self._kernels.append(Kernel(COPY, (name,), _NONE))
        else:
            self._nbytes[name] = 0
        self._behind[name] = frozenset((name,))

    def visit(self, i: int, step: ListingStep, roots: int) -> None:
        """Fuse an instruction into its readers, or write its kernel."""
        copies = i in self._line.copied
        sources = self._copied(i) if copies else self._sources(self._line.reads[i])
        if i in self._line.filled:
            sources = _joined((sources, self._filled(i)))
        if isinstance(step, Fence):
            self._fence(i, step)
            return
        if self._counts_places(i, step) or self._spreads_mask(i, step):
            return
        nbytes = self._result_bytes(i, step)
        if self._turns_anew(i, sources, nbytes[0]):
            return
        if self._line.copied and self._line.fused[i]:
            self._computed[self._line.makes[i][0]] = sources, nbytes[0]
        readers = min(_READERS, roots.bit_count())
        if readers and self._fused(i, step, sources, sum(nbytes), readers):
            return
        makes = tuple(self._line.makes[i])
        for name, size in zip(makes, nbytes, strict=True):
            in_stack = name in self._stacked and self._line.fused[i]
            self._nbytes[name] = 0 if in_stack and not self._line.readers.get(name) else size
            self._behind[name] = frozenset((name,))
        if self._line.fused[i] and self._sizes.platform == "gpu":
            self._written_at.update(dict.fromkeys(makes, len(self._kernels)))
        if isinstance(step, Move):
            sources = self._turned_before(step, _pieces(sources))
            mesh = self._sizes.mesh
            for kernel, size in _move_kernels(i, step, _pieces(sources), nbytes[0], mesh):
                self._nbytes[kernel.makes[0]] = size
                self._kernels.append(kernel)
        else:
            self._kernels.append(self._kernel(i, step, makes, _pieces(sources)))
        if i in self._line.turned:
            turned = f"{makes[0]} in order"
            self._nbytes[turned], self._behind[makes[0]] = nbytes[0], frozenset((turned,))
            self._kernels.append(Kernel(COPY, (turned,), frozenset(makes), is_light=True))

    def _filled(self, i: int) -> Pieces:
        """The pieces full of one number that an instruction loads."""
        names = self._line.filled[i]
        for name in names:
            if name not in self._nbytes:
                _, dtype, shape = self._line.fills[name]
                self._nbytes[name] = math.prod(shape) * item_bytes(dtype)
                self._kernels.append(Kernel(FILL, (name,), _NONE))
        return frozenset(names)

    def _counts_places(self, i: int, step: ListingStep) -> bool:
        """Notes an iota along a dim that devices share, and tells if an instruction is one.

        Where a device's part begins depends on the device: XLA for GPUs stores the places in that,
        a vector, for all that reads them.
        """
        op = self._line.ops[i]
        if self._sizes.platform != "gpu" or op is None or op.kind != "iota":
            return False
        assert isinstance(step, LocalOp)
        dim = op.whole("dimension")
        axes = step.result_shardings[0].dims[dim]
        if self._sizes.mesh.size(axes) == 1:
            return False
        places = f"places along {', '.join(axes)} of {op.results[0].shape[dim]}"
        if places not in self._nbytes:
            self._nbytes[places] = self._sizes.made(step, op)[dim] * _PLACE_BYTES
            self._kernels.append(Kernel(i, (places,), _NONE, is_light=True))
        self._behind[self._line.makes[i][0]] = frozenset((places,))
        return True

    def _spreads_mask(self, i: int, step: ListingStep) -> bool:
        """Notes a mask that is spread over more dims, and tells if an instruction does that.

        What is computed of iotas and numbers alone XLA for TPUs stores before that, for all that
        spread the same.
        """
        op = self._line.ops[i]
        if not self._line.into_products or op is None or not isinstance(step, LocalOp):
            return False
        given = list[str]()
        for name, operand in zip(step.operands, op.operands, strict=True):
            known = str(operand) if name is None else self._of_nothing.get(name)
            if known is None or not self._line.fused[i]:
                return False
            given.append(known)
        is_mask = any(known.startswith(_MASK) for known in given)
        if is_mask and op.kind == "broadcast_in_dim":
            (mask,) = given
            if mask not in self._nbytes:
                items = math.prod(self._sizes.shard(step, op))
                self._nbytes[mask] = items * item_bytes(op.results[0].dtype)
                self._kernels.append(Kernel(i, (mask,), _NONE, is_light=True))
            self._behind[step.results[0]] = frozenset((mask,))
            return True
        lies = op.results[0].shape, step.result_shardings[0]
        kind = _MASK if is_mask or op.kind == "iota" else "number"
        made = (op.kind, op.params, *lies, *given)
        number = self._equals.setdefault(made, len(self._equals))
        self._of_nothing[step.results[0]] = f"{kind} {number}"
        return False

    def _turns_anew(self, i: int, sources: _Behind, nbytes: int) -> bool:
        """Writes a value in another order where XLA for TPUs computes it once more for that.

        It does where a sum of two products leads to it, from these: there the order is changed,
        which costs nothing, so that they are held beside their sum. It keeps what is large.

            s = x @ y + z @ w    p = f(s)    p.T
        """
        op = self._line.ops[i]
        if not self._line.into_products or op is None or op.kind != "transpose":
            return False
        before = self._line.maker.get(self._line.reads[i][0])
        if before is None or not self._line.fused[before] or nbytes > LARGE_ON_TPU_BYTES:
            return False
        reads = self._with_sums_apart(_pieces(sources), nbytes)
        if reads is None:
            return False
        (name,) = self._line.makes[i]
        self._nbytes[name], self._behind[name] = nbytes, frozenset((name,))
        self._kernels.append(Kernel(i, (name,), reads, is_light=True))
        return True

    def _with_sums_apart(self, pieces: Pieces, nbytes: int) -> Pieces | None:
        """The products, and what is smaller than so many bytes, that pieces are computed of.

        None if anything else leads to them that is as large, or no sum of two products does.
        """
        for written in self._kernels[self._found_makers :]:
            self._makers.update(dict.fromkeys(written.makes, written))
        self._found_makers = len(self._kernels)
        makers = self._makers
        found, waiting, seen, adds = set[str](), [*pieces], set[str](), False
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            kernel = makers.get(name)
            op = self._line.ops[kernel.at] if kernel is not None and kernel.at >= 0 else None
            if self._nbytes[name] < nbytes // 2 or (op is not None and is_product(op)):
                found.add(name)
            elif kernel is None or op is None or not is_fused_into_readers(op):
                return None
            else:
                adds = adds or (op.kind in ADDITIONS and len(kernel.reads) == 2)
                waiting += kernel.reads
        return frozenset(found) if adds else None

    def _turned_before(self, move: Move, sources: Pieces) -> Pieces:
        """The pieces that a move sends: a filter's gradient is turned over before it is scattered
        along another dim.

        It lies with the features that the filter makes outermost, and what is scattered lies there.
        """
        at = self._line.maker.get(move.source)
        op = self._line.ops[at] if at is not None else None
        if (
            self._sizes.platform != "gpu" or not move.steps or op is None
            or op.kind != "conv_general_dilated" or has_filter(op)
            or move.steps[0].kind != "reduce-scatter" or move.steps[0].dim == _features(op)
        ):  # fmt: skip
            return sources
        turned = f"{move.source} turned for {move.result}"
        self._nbytes[turned] = self._nbytes[move.source]
        self._kernels.append(Kernel(COPY, (turned,), sources, is_light=True))
        return frozenset((turned,))

    def _with_epilogues(self, kept: Pieces) -> list[Kernel]:
        """The kernels, those of products with gelu or an addition that alone reads what they make.

        cuBLAS computes it before it stores: XLA for GPUs asks for that (its GemmRewriter). What is
        added may give its buffer to the sum.
        """
        if not self._epilogues:
            return list(self._kernels)
        readers = Counter(r for kernel in self._kernels for r in kernel.reads)
        product_of = {
            result: product
            for product, result in self._epilogues.items()
            if readers[product] == 1 and product not in kept
        }
        makers = {k.makes[0]: k for k in self._kernels if k.makes[0] in product_of.values()}
        left: list[Kernel] = []
        for kernel in self._kernels:
            name = kernel.makes[0]
            if name in product_of:
                product = product_of[name]
                own, added = makers[product].reads, kernel.reads - {product}
                # Only what is added gives its buffer, and not an operand that is as large.
                in_place = all(self._nbytes[r] != self._nbytes[name] for r in own)
                left.append(
                    replace(
                        makers[product], makes=kernel.makes, reads=own | added, in_place=in_place
                    )
                )
            elif name not in makers:
                left.append(kernel)
        return left

    def _product_before(self, i: int) -> str | None:
        """The product's result that an instruction makes gelu of, by tanh, with a bias or without.

        h = x @ w + b    y = 0.5 * h * (1 + tanh(0.8 * (h + 0.04 * h ** 3)))
        """
        line, last = self._line, self._line.ops[i]
        if self._sizes.platform != "gpu" or last is None or last.kind != "mul":
            return None
        kinds, sources, seen = set[str](), set[str](), set[str]()
        front = [*line.reads[i]]
        while front:
            name = front.pop()
            if name in seen:
                continue
            seen.add(name)
            at = line.maker.get(name)
            op = line.ops[at] if at is not None else None
            if at is None or op is None or name in self._nbytes:
                sources.add(name)
            elif op.kind in _IN_GELU:
                kinds.add(op.kind)
                front += line.reads[at]
            else:
                return None
        products = [n for n in sorted(sources) if self._plain_product(n)]
        if not kinds.issuperset(("tanh", "integer_pow")) or len(products) != 1:
            return None
        others = sum(self._nbytes.get(n, 0) for n in sources) - self._nbytes[products[0]]
        return products[0] if _LARGER * others <= self._nbytes[products[0]] else None

    def _product_added(self, i: int) -> str | None:
        """The product's result, with a bias or without, that an instruction adds a piece to.

        h = x @ w + b    y = h + c    or    y = c + h.T
        """
        line, op = self._line, self._line.ops[i]
        reads = line.reads[i]
        if (
            self._sizes.platform != "gpu" or op is None
            or op.kind not in ADDITIONS or len({*reads}) != 2
        ):  # fmt: skip
            return None
        for one, other in (reads, reads[::-1]):
            product, added = self._moved_from(self._unbiased(one)), self._reshaped(other)
            made = self._plain_product(product)
            if made is None or made.results[0].dtype != op.results[0].dtype:
                continue
            if self._nbytes.get(added) == self._nbytes.get(product, 0):
                return product
        return None

    def _unbiased(self, name: str) -> str:
        """The value to which a vector is added where that makes another, or the value itself."""
        line, at = self._line, self._line.maker.get(name)
        op = line.ops[at] if at is not None and name not in self._nbytes else None
        if at is None or op is None or op.kind != "add" or len(line.reads[at]) != 2:
            return self._reshaped(name)
        one, other = line.reads[at]
        spread = line.maker.get(other)
        vector = line.ops[spread] if spread is not None else None
        if vector is None or vector.kind != "broadcast_in_dim" or len(operand_shape(vector, 0)) > 1:
            return self._reshaped(name)
        return self._reshaped(one)

    def _reshaped(self, name: str) -> str:
        """The stored value of which another is a reshape, or the value itself."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None and name not in self._nbytes else None
        if at is None or op is None or op.kind != "reshape":
            return name
        return self._reshaped(self._line.reads[at][0])

    def _plain_product(self, name: str) -> Op | None:
        """The matrix product without a dim of batch that a value is the result of."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None else None
        if op is None or op.kind != "dot_general" or _terms_of_product(op) is None:
            return None
        return op

    def _copied(self, i: int) -> _Behind:
        """The pieces that a kernel reads, of which some are written out in another order before."""
        reads, copies = self._line.reads[i], self._line.copied[i]
        sources = self._sources([r for r in reads if r not in copies])
        for name, copy in copies.items():
            if copy not in self._nbytes:
                self._copy(name, copy)
            sources = _joined((sources, frozenset((copy,))))
            if (made := self._line.before.get(copy)) is not None:
                sources = _joined((sources, _pieces(self._behind.get(name, _NONE)) - {made}))
        return sources

    def _copy(self, name: str, copy: str) -> None:
        """Write a value in another order, on a GPU in the kernel that writes it as it lies.

        XLA makes one of element-wise kernels that read the same, if no two of them turn it over.
        """
        stored = self._behind.get(name, _NONE), self._nbytes.get(name, 0)
        behind, self._nbytes[copy] = self._computed.get(name, stored)
        if copy in self._line.before:
            behind = frozenset((self._line.before[copy],))
        padded = self._line.padded
        if copy in padded:  # which has another shape: no kernel writes both
            self._nbytes[copy] = round(self._nbytes[copy] / padded.get(name, 1) * padded[copy])
            behind, at = stored[0], None
        elif copy in self._line.grouped:
            behind, at = self._by_groups(name, copy, stored[0]), None
        else:
            at = self._written_at.pop(name, None)
        if at is not None:
            kernel = self._kernels[at]
            self._kernels[at] = replace(kernel, makes=(*kernel.makes, copy))
            return
        wasted = self._wasted(copy)
        self._kernels.append(
            Kernel(COPY, (copy,), _pieces(behind), is_light=True, wasted_bytes=wasted)
        )

    def _by_groups(self, name: str, copy: str, behind: _Behind) -> _Behind:
        """Weighs the copy of rows for each group, and tells what it is made from."""
        made = self._line.grouped[copy]
        self._nbytes[copy] *= made.count
        if made.turned is None:
            return _joined((behind, self._sources([made.sizes] if made.sizes else [])))
        if made.turned not in self._nbytes:
            self._copy(name, made.turned)
        return frozenset((made.turned,))

    def _wasted(self, copy: str) -> int:
        """Bytes that are loaded beside those that a copy is made from."""
        original = self._line.apart.get(copy)
        op = self._line.ops[self._line.maker[original]] if original is not None else None
        if original is None or op is None:
            return 0
        nbytes = self._nbytes.get(original, 0)
        return wasted_bytes(nbytes, op.results[0].dtype)

    def _sources(self, reads: Sequence[str]) -> _Behind:
        """The stored pieces behind some others."""
        if len(reads) == 1:
            return self._behind.get(reads[0], _NONE)
        behind = [b for b in map(self._behind.get, reads) if b]
        return behind[0] if len(behind) == 1 else _joined(behind)

    def _fence(self, i: int, step: Fence) -> None:
        """Renames pieces; what reads one of them waits for all.

        A value that is another in an order of its own may lie in any: the fence waits for that.
        """
        ticket = f"fence {i}"
        self._nbytes[ticket] = 0
        rows = zip(step.sources, step.results, strict=True)
        waits = [self._moved_from(s) for s, made in rows if not self._is_left_out(i, s, made)]
        self._kernels.append(Kernel(i, (ticket,), _pieces(self._sources(waits))))
        for name, source in zip(step.results, step.sources, strict=True):
            self._behind[name] = _joined((self._behind.get(source, _NONE), frozenset((ticket,))))

    def _is_left_out(self, i: int, source: str, result: str) -> bool:
        """True if XLA takes a value out of a fence: nothing reads what becomes of it, nor itself.

        Products read what a reshaped value was before.
        """
        line, at = self._line, self._line.maker.get(source)
        op = line.ops[at] if at is not None else None
        if op is None or op.kind != "reshape" or line.readers.get(result) or result in line.loaded:
            return False
        others = (line.ops[j] for j in line.readers[source] if j != i)
        return all(other is not None and is_product(other) for other in others)

    def _moved_from(self, name: str) -> str:
        """The value of which another is a transpose or a reshape."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None else None
        if at is None or op is None or op.kind not in _TURNING:
            return name
        return self._moved_from(self._line.reads[at][0])

    def _result_bytes(self, i: int, step: LocalOp | Move | Loop) -> list[int]:
        if isinstance(step, Move):
            return [self._sizes.of(step.value, step.after)]
        op = self._line.ops[i]
        assert op is not None
        if len(op.results) == 1:
            value = op.results[0]
            share = self._line.padded.get(step.results[0], 1.0)
            return [round(share * self._sizes.of(value, step.result_shardings[0]))]
        laid = zip(op.results, step.result_shardings, strict=True)
        return [self._sizes.of(v, s) for v, s in laid]

    def _fused(
        self, i: int, step: LocalOp | Move | Loop, sources: _Behind, nbytes: int, readers: int
    ) -> bool:
        """Decides if computing a piece in each reader is cheaper than storing it, and notes it."""
        op, reads = self._line.ops[i], self._line.reads[i]
        work = sum(self._work.get(r, 0.0) for r in reads)
        if op is not None:
            work += nbytes / max(1, item_bytes(op.results[0].dtype)) * work_bytes(op)
        picked = self._picked_inside(i, step, nbytes)
        if readers > 1 and not self._is_only_picked_from(i):
            again = work
            for piece in _pieces(sources):
                again += picked.get(piece, self._nbytes.get(piece, 0))
            if readers * again > again + nbytes * (1 + readers):
                return False
        dear = self._computed_inside(i, nbytes)
        for name in self._line.makes[i]:
            self._behind[name], self._work[name] = sources, work
            if picked:
                self._picked[name] = picked
            if dear:
                self._dear[name] = dear
        return True

    def _picked_inside(self, i: int, step: LocalOp | Move | Loop, nbytes: int) -> Mapping[str, int]:
        """The bytes of the pieces behind an instruction's results that need not be loaded whole.

        What looks something up loads as many of a piece's items as it makes, however many it has:

            x = table[i]    loads i and, of the table, as much as x has

        What adds more to it than a vector is stored, as a position's embedding beside a token's.
        """
        op, reads = self._line.ops[i], self._line.reads[i]
        is_pick = op is not None and primitive(op.kind).picks == 0 and bool(reads)
        if not is_pick and self._picked.keys().isdisjoint(reads):
            return {}
        loaded: dict[str, int] = {}
        for k, name in enumerate(reads):
            picked = self._picked.get(name, {})
            share = self._picked_share(i, step) if is_pick and k == 0 else 1.0
            for piece in _pieces(self._behind.get(name, _NONE)):
                whole = self._nbytes.get(piece, 0)
                own = int(share * picked.get(piece, whole))
                if not is_pick and own == whole and _LARGER * whole > nbytes:
                    return {}
                loaded[piece] = loaded.get(piece, 0) + own
        return {p: n for p, n in loaded.items() if n < self._nbytes.get(p, 0)}

    def _is_only_picked_from(self, i: int) -> bool:
        """True if all that reads an instruction's results looks something up in them."""
        line = self._line
        for name in line.makes[i]:
            for j in line.readers.get(name, ()):
                op = line.ops[j]
                if op is None or primitive(op.kind).picks != 0 or line.reads[j][0] != name:
                    return False
        return True

    def _picked_share(self, i: int, step: LocalOp | Move | Loop) -> float:
        """Of the items of an instruction's first operand, the share that comes out."""
        op = self._line.ops[i]
        if op is None or not isinstance(step, LocalOp) or op.rule is None:
            return 1.0
        items = math.prod(self._sizes.shard(step, op))
        return min(1.0, math.prod(self._sizes.made(step, op)) / max(1, items))

    def _computed_inside(self, i: int, nbytes: int) -> Mapping[int, float]:
        """The dear instructions that a kernel of this one computes, with the bytes of each."""
        op = self._line.ops[i]
        found: dict[int, float] = {}
        for inside in map(self._dear.get, self._line.reads[i]):
            found.update(inside or {})
        if op is not None and self._line.fused[i] and gpu_bytes(op):
            found[i] = nbytes / item_bytes(op.results[0].dtype) * gpu_bytes(op)
        return found

    def _kernel(
        self, i: int, step: LocalOp | Loop, makes: tuple[str, ...], sources: Pieces
    ) -> Kernel:
        op = self._line.ops[i]
        assert op is not None
        if isinstance(step, Loop):
            # A loop's results take over the buffers that it starts from.
            scratch = self._inner_bytes(step, op, self._nbytes)
            return Kernel(i, makes, sources, scratch, in_place=True)
        scratch = 0
        if op.kind == "dot_general":
            items = self._nbytes[makes[0]] // item_bytes(op.results[0].dtype)
            shard = self._sizes.shard(step, op)
            scratch = split_bytes(op, items, step.operand_shardings[0], shard)
        light = self._line.fused[i] or is_reduction(op)
        in_place = works_in_place(op)
        work = 0.0
        product = self._product_before(i) or self._product_added(i)
        if product is not None:
            self._epilogues[product] = makes[0]
        if light and self._sizes.platform == "gpu":
            inside = self._computed_inside(i, self._result_bytes(i, step)[0])
            work = sum(inside[k] for k in sorted(inside))
        picks = (
            light
            and not is_reduction(op)
            and bool(self._picked_inside(i, step, self._nbytes[makes[0]]))
        )
        return Kernel(
            i, makes, sources, scratch, in_place, is_light=light, picks=picks, work_bytes=work
        )


# XLA combines these with their like; each of the others runs by itself.
_COMBINED = ("all-gather", "all-reduce", "reduce-scatter")


def moves_by_piece(block: Block) -> Mapping[str, tuple[Move, int]]:
    """By the name of a piece, its move and the number of the collective that makes it."""
    moves = (step for step in block.instructions if isinstance(step, Move))
    return {name: (move, j) for move in moves for j, name in enumerate(pieces_of(move))}


def pieces_of(move: Move) -> list[str]:
    """The names of the pieces that a move's collectives make, its result the last."""
    between = range(1, len(move.collectives))
    return [*(f"{move.result} after {j}" for j in between), move.result]


def _move_kernels(
    i: int, move: Move, sources: Pieces, result_bytes: int, mesh: MeshShape
) -> Iterator[tuple[Kernel, int]]:
    """A kernel for each collective of a move, with the bytes of the piece that it makes.

    Steps that are local run with the next collective, or with the last one.
    """
    moved, names, steps = move.collectives, pieces_of(move), list(move.steps)
    if not moved:
        yield Kernel(i, (move.result,), sources, in_place=True), result_bytes
        return
    for j, (only, name) in enumerate(zip(moved, names, strict=True)):
        is_last = name == move.result
        end = next(k for k, step in enumerate(steps) if step.kind == only.kind)
        own = steps if is_last else steps[: end + 1]
        steps = steps[end + 1 :]
        gathered, scattered = only.kind == "all-gather", only.kind == "reduce-scatter"
        out = only.nbytes // mesh.size(only.axes) if scattered else only.nbytes
        # What a gather makes for a slice, or a slice for a scatter, lies nowhere else.
        is_between = (gathered and own[-1].kind != only.kind) or (
            scattered and own[0].kind != only.kind
        )
        group = (only.kind, only.axes, "" if gathered else move.value.dtype)
        kernel = Kernel(
            i, (name,), sources, only.nbytes if is_between else 0,
            in_place=only.kind == "all-reduce" and len(own) == 1,
            group=group if only.kind in _COMBINED else None,
            # How much is combined counts by what comes out.
            moved_bytes=out if scattered else only.nbytes,
            is_early=gathered, part=j,
        )  # fmt: skip
        yield kernel, result_bytes if is_last else out
        sources = frozenset((name,))
