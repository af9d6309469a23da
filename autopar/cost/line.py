"""A block read as a straight line: who makes and reads each value, in what order, and from where.

Element-wise work may read operands that do not lie alike, but no sum is fused with it then.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from autopar.cost.layouts import Layouts, Orders, visited
from autopar.cost.ops import (
    ADDITIONS,
    LONGEST_ROW,
    filled_share,
    group_count,
    has_features_for_rows,
    has_filter,
    is_fused_into_readers,
    is_product,
    is_reduction,
    is_run_backward,
    is_scatter,
    made_share,
    padded_share,
    padding,
    summed_dims,
)
from autopar.cost.sizes import Sizes, product_dims
from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Op
from autopar.ir.listing import (
    Block,
    Fence,
    LocalOp,
    Loop,
    Move,
    names_made,
    names_read,
)
from autopar.ir.values import Literal, item_bytes

# What one block's registers hold, of which XLA gives a tile two fifths.
_MOST_IN_TILE = 65_536 * 2 // 5
# BLAS multiplies matrices of 2-byte numbers in tensor cores, by so many rows and columns at once.
_HALVES, _AT_ONCE = frozenset({"bf16", "f16"}), 8


# So many times over, beside once for itself, no kernel of XLA for GPUs computes what it could load.
_MANY_TIMES, _ITSELF = 3.0, -1

_NONE = frozenset[int]()
_ROOTS = 64  # so many are told: of a sum over a deep step, every update is one

# A number that is everywhere, its dtype and the shape.
Fill = tuple[str, str, tuple[int, ...]]


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
    """A block's instructions, by index, and the values between them, by name.

    A copy of a value in another order has a name of its own.
    """

    # -- instructions ----------------------------------------------------------------------
    into_products: bool = False  # work is fused into products, as on a TPU
    ops: list[Op | None] = field(default_factory=list[Op | None])
    reads: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    makes: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    # May be computed in its readers.
    fused: list[bool] = field(default_factory=list[bool])
    # Anyone wants it.
    alive: list[bool] = field(default_factory=list[bool])
    # Into which kernels it may be fused, and of a copy those behind it, the first of many: none
    # where the result is stored in any case.
    roots: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    # Those that one kernel would compute many times over.
    repeated: set[int] = field(default_factory=set[int])

    # -- values ----------------------------------------------------------------------------
    readers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    maker: dict[str, int] = field(default_factory=dict[str, int])
    # Read from memory by something, or given back by the block.
    loaded: set[str] = field(default_factory=set[str])
    # In the order in which a compiler visits them from the outputs on.
    visits: Mapping[str, int] = field(default_factory=dict[str, int])

    # -- orders ----------------------------------------------------------------------------
    orders: Orders = field(default_factory=lambda: Orders({}))
    # What an instruction reads in another order than it lies in -> the names of the copies.
    copied: dict[int, Mapping[str, str]] = field(default_factory=dict[int, Mapping[str, str]])
    # A copy that is nothing but another order -> the value and the order.
    copies: Mapping[str, tuple[str, tuple[int, ...]]] = field(
        default_factory=dict[str, tuple[str, tuple[int, ...]]]
    )
    # Gathers whose results the block gives back in another order than they arrive in.
    turned: set[int] = field(default_factory=set[int])
    # Other results that are given back so: the kernels that make them turn them over.
    lying_turned: frozenset[str] = frozenset()
    # Element-wise work on values that do not lie alike: a kernel of its own reads them across, as
    # one that sums cannot.
    transposed: set[str] = field(default_factory=set[str])
    # What an all-to-all joined, and what is made of such alone -> the dim that lies in parts. A sum
    # takes it as it lies; with anything else it is read across.
    in_parts: dict[str, int] = field(default_factory=dict[str, int])
    # A smaller value that is spread over such parts: only a sum along that dim takes it as it lies.
    over_parts: set[str] = field(default_factory=set[str])

    # -- what Triton, BLAS and cuDNN ask for -----------------------------------------------
    # Sums over short rows, and what is made of them -> how many rows there are.
    one_a_row: dict[str, int] = field(default_factory=dict[str, int])
    # What Triton computes of rows with their sums, such as a softmax.
    with_sums: set[str] = field(default_factory=set[str])
    # A copy whose items are loaded one by one -> the product's result that it is made from.
    apart: dict[str, str] = field(default_factory=dict[str, str])
    # Such a copy that stands before what is computed of the result -> that result.
    before: dict[str, str] = field(default_factory=dict[str, str])
    # Copies of images and of what products read, and results of products and convolutions -> to how
    # many times their size they are padded.
    padded: dict[str, float] = field(default_factory=dict[str, float])
    # A copy of rows, one for each group of a ragged product.
    grouped: dict[str, ByGroups] = field(default_factory=dict[str, ByGroups])

    # -- what no input leads to ------------------------------------------------------------
    # Places that are counted, what is computed of them and of numbers, as a mask is, and such
    # numbers -> a number that all have that are computed alike, in other blocks too.
    counted: dict[str, int] = field(default_factory=dict[str, int])
    constant: dict[str, int] = field(default_factory=dict[str, int])

    # -- buffers that are full of one number -----------------------------------------------
    # What reads a number that a scatter finds everywhere loads it -> the names of what is loaded.
    filled: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    fills: dict[str, Fill] = field(default_factory=dict[str, Fill])
    # Gradients of the largest in windows, which are scattered into zeros.
    windowed: set[int] = field(default_factory=set[int])

    def turns_round(self, i: int) -> bool:
        """True if a convolution reads its filter from the last tap to the first."""
        return len(self.reads[i]) > 1 and _is_turned_round(self, self.reads[i][1])


def read_line(block: Block, sizes: Sizes) -> Line:
    """A block as it reads: in one pass, and back once more for what is wanted of it."""
    return sizes.once(Line, block, {}, lambda: _read(block, sizes))


def _read(block: Block, sizes: Sizes) -> Line:
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
        reads: Sequence[str] = tuple([name for name in names_read(step) if name is not None])
        if sizes.platform == "gpu" and op is not None and op.kind == "convert_element_type":
            reads = _before_narrowing(line, sizes, op, reads)
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
            _made_of_nothing(line, sizes, i, step, op)
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
        in_order = {*makers.values(), *_read_in_order(line, block)}
        line.turned = {
            i for i in in_order
            if isinstance(step := block.instructions[i], Move) and step.joins_inside("all-gather")
        }  # fmt: skip
        line.lying_turned = frozenset(
            o for o, i in makers.items() if line.fused[i] and layouts.orders.is_turned(o)
        )
    for copy, made in line.grouped.items():
        if made.turned not in line.grouped:
            line.grouped[copy] = replace(made, turned=None)
    _scatter_into_sums(line)
    if sizes.platform == "gpu":
        _read_from_triton(line, block, sizes)
        _read_filled(line, block, sizes)
    line.apart, line.before, line.orders = layouts.apart, layouts.before, layouts.orders
    line.copies = layouts.copies
    if sizes.platform == "gpu":
        line.visits = visits
    _find_roots(line, set(returned))
    if sizes.platform == "gpu":
        _find_repeated(line)
    return line


def _before_narrowing(line: Line, sizes: Sizes, op: Op, reads: Sequence[str]) -> Sequence[str]:
    """The values that a cast reads: what was cast to fewer bytes where it is now cast back.

    XLA may keep more precision than it is asked for, and casts neither way.
    """
    at = line.maker.get(reads[0]) if reads else None
    cast = line.ops[at] if at is not None else None
    if at is None or cast is None or cast.kind != op.kind or not line.reads[at]:
        return reads
    narrow, wide = cast.results[0].dtype, op.results[0].dtype
    is_back = item_bytes(narrow) < item_bytes(wide) and sizes.dtype(cast.operands[0]) == wide
    return line.reads[at] if is_back else reads


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


def _read_in_order(line: Line, block: Block) -> Iterator[int]:
    """The instructions whose results loops take in the order of their dims."""
    for loop in block.instructions:
        if isinstance(loop, Loop):
            turned = {k for k, _ in loop.turned}
            taken = (o for k, o in enumerate(loop.operands) if k not in turned)
            yield from (line.maker[o] for o in taken if o in line.maker)


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
    if move.joins_inside("all-to-all"):
        line.in_parts[move.result] = move.steps[-1].dim
    if move.joins_inside("all-gather"):
        local = sizes.local(move.after, move.value.shape)
        layouts.orders.gathered(move.result, move.steps[-1].dim, local)
    if all(step.kind == "all-reduce" for step in move.steps):
        layouts.orders.renamed(move.source, move.result)
    if move.steps and move.steps[0].kind in ("all-to-all", "reduce-scatter"):
        first = move.steps[0]
        sent = layouts.sent(move.source, first.dim if first.to_dim < 0 else first.to_dim)
        if sent is not None:
            line.copied[i] = {move.source: sent}


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
        apart = _laid_out_filter(line, sizes, i, op, run)
        image, share = run.operands[0], padded_share(op)
        if sizes.platform == "gpu" and is_run_backward(op, _is_turned_round(line, run.operands[1])):
            line.padded[run.results[0]] = made_share(op)
        elif sizes.platform == "gpu":
            if has_features_for_rows(op):
                line.copied[i] = {name: f"{name} as features" for name in line.reads[i]}
                apart.update(line.reads[i])
            if image is not None and share > 1:
                copy = f"{line.copied.get(i, {}).get(image, image)} padded by {padding(op)}"
                line.copied[i] = {**line.copied.get(i, {}), image: copy}
                line.padded[copy] = share
                apart.add(image)
        return set(line.reads[i]) - apart
    if op.kind == "ragged_dot_general" and sizes.platform == "gpu":
        line.copied[i] = dict(_by_groups(line, sizes, run, op))
        return set(line.reads[i]) - line.copied[i].keys()
    if op.kind == "dot_general":
        local = sizes.local(run.result_shardings[0], op.results[0].shape)
        copied = dict(layouts.product(op, run.operands, run.results[0], local, run.swapped))
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


def _made_of_nothing(line: Line, sizes: Sizes, i: int, run: LocalOp, op: Op) -> None:
    """Notes what is computed of places and of numbers alone.

    What spreads a mask over more dims on a TPU is none of it: its compiler stores the mask.
    """
    if not line.fused[i]:
        return
    given: list[object] = []
    for name, operand in zip(run.operands, op.operands, strict=True):
        known = line.counted.get(name, line.constant.get(name)) if name is not None else None
        if name is None and isinstance(operand, Literal) and operand.text != "opaque":
            given.append(operand)
        elif known is not None:
            given.append(known)
        else:
            return
    is_mask = not line.counted.keys().isdisjoint(line.reads[i])
    if is_mask and line.into_products and op.kind == "broadcast_in_dim":
        return
    made = (op.kind, op.params, op.results[0].shape, run.result_shardings[0], *given)
    kept = line.counted if is_mask or op.kind == "iota" else line.constant
    kept[run.results[0]] = sizes.number_of(made)


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


def _laid_out_filter(line: Line, sizes: Sizes, i: int, op: Op, run: LocalOp) -> set[str]:
    """Filters are read in an order of their own, and in that again for the input's gradient.

    That one reads them turned round, which the kernel does itself. Where it cannot leave taps apart
    it reads them with zeros between.
    """
    filters = run.operands[1]
    if filters is None or not has_filter(op):
        return set()
    share = filled_share(op) if sizes.platform == "gpu" else 1.0
    if share > 1:
        filled = f"{filters} as filters {op.ints('rhs_dilation')} apart"
        line.copied[i], line.padded[filled] = {filters: filled}, share
        return {filters}
    at = line.maker.get(filters)
    turns = line.ops[at] if at is not None else None
    if at is None or turns is None or turns.kind != "rev":
        at, original = i, filters
    else:
        original = line.reads[at][0]
    line.copied[at] = {original: f"{original} as filters"}
    return {filters}


def _is_turned_round(line: Line, filters: str | None) -> bool:
    """True for a filter that is read from its last tap to its first, in whatever order of dims."""
    at = line.maker.get(filters) if filters is not None else None
    op = line.ops[at] if at is not None else None
    if at is None or op is None:
        return False
    return op.kind == "rev" or (
        op.kind == "transpose" and _is_turned_round(line, line.reads[at][0])
    )


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


def _read_from_triton(line: Line, block: Block, sizes: Sizes) -> None:
    """Notes what sums over other dims load of that which Triton computes of rows with their sums.

    Where one reads x and the sum, or the largest, of each row of x, which nothing else reads, XLA
    for GPUs has Triton run both (SoftmaxRewriterTriton), and all that is computed of them. It can
    not sum over other dims, unless all that is summed up fits in one tile.

        y = x - mean(x)    dw = sum(dy * y, dims=[0])    stores dy * y
    """
    found = set[str]()
    for i, (step, op) in enumerate(zip(block.instructions, line.ops, strict=True)):
        if not isinstance(step, LocalOp) or op is None:
            continue
        if line.fused[i]:
            computed = found.intersection(line.reads[i]) - line.loaded
            if computed or _closes_diamond(line, sizes, block, i):
                found.update(line.makes[i])
        elif is_reduction(op) and (dims := summed_dims(op)):
            shape = sizes.shard(step, op)
            row = len(shape) - 1
            tile = math.prod(1 << (shape[d] - 1).bit_length() for d in {*dims, row})
            if dims != (row,) and tile > _MOST_IN_TILE:
                read = found.intersection(line.reads[i])
                line.loaded.update(_before_widening(line, sizes, name) for name in read)


def _before_widening(line: Line, sizes: Sizes, name: str) -> str:
    """The value of which another is a cast to a wider dtype, or the value itself."""
    at = line.maker[name]
    op = line.ops[at]
    if op is None or op.kind != "convert_element_type":
        return name
    before, after = sizes.dtype(op.operands[0]), op.results[0].dtype
    return line.reads[at][0] if item_bytes(before) < item_bytes(after) else name


def _closes_diamond(line: Line, sizes: Sizes, block: Block, i: int) -> bool:
    """True if an instruction reads a value and the sum of each of that value's rows."""
    reads = line.reads[i]
    if len(reads) != 2:
        return False
    # 1. From the second operand back to the sum, each step read but once.
    steps = [*_behind_one(line, reads[1])]
    at = line.maker.get(steps[-1])
    step = block.instructions[at] if at is not None else None
    op = line.ops[at] if at is not None else None
    if at is None or op is None or not isinstance(step, LocalOp) or len(steps) < 2:
        return False
    if any(len(line.readers[name]) != 1 for name in steps):
        return False
    shape = sizes.shard(step, op)
    if summed_dims(op) != (len(shape) - 1,) or shape[-1] > LONGEST_ROW:
        return False
    # 2. From the sum and from the first operand back to the same value.
    return not {*_behind_one(line, line.reads[at][0])}.isdisjoint(_behind_one(line, reads[0]))


def _behind_one(line: Line, name: str) -> Iterator[str]:
    """A value, and those that it is computed of by steps that read but one."""
    while True:
        yield name
        at = line.maker.get(name)
        if at is None or not line.fused[at] or len({*line.reads[at]}) != 1:
            return
        name = line.reads[at][0]


def _read_filled(line: Line, block: Block, sizes: Sizes) -> None:
    """Notes what loads a number that fills a buffer which others write into.

    To XLA the two are one value, of which those get copies; see `Line.filled`. What is computed of
    numbers alone, and what adds zeros, is computed before. The gradient of the largest in windows
    is scattered into zeros.

        z = zeros    g = scatter(z, i, u)    p' = p - where(p > 0, g, 0)    loads p, g and z
    """
    numbers: dict[str, Literal] = {}  # what is one everywhere, its text "" if it is not known
    read: list[tuple[int, Fill]] = []
    written = set[Fill]()
    for i, (step, op) in enumerate(zip(block.instructions, line.ops, strict=True)):
        if not isinstance(step, LocalOp) or op is None:
            continue
        if op.kind == "select_and_scatter_add" and len({*line.reads[i]}) == 2:
            zeros = filled_with(Literal("0", op.results[0].dtype), sizes.made(step, op))
            written.add(zeros)
            read.append((i, zeros))
            line.windowed.add(i)
        if not line.fused[i]:
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


def _find_roots(line: Line, wanted: Set[str]) -> None:
    """Notes what is wanted of a line whose block gives back some values, and its roots."""
    count = len(line.ops)
    line.alive, line.roots = [False] * count, [_NONE] * count
    alive, roots, loaded, readers = line.alive, line.roots, line.loaded, line.readers
    copies: dict[str, int] = {}  # kernels that write a value in another order
    for i in range(count - 1, -1, -1):
        fusible = line.fused[i]
        found, used = set[frozenset[int]](), False
        for m in line.makes[i]:
            used = used or m in wanted
            fusible = fusible and m not in loaded
            for j in readers.get(m, ()):
                if alive[j]:
                    used = True
                    copy = line.copied[j].get(m) if j in line.copied else None
                    if copy in line.grouped:
                        copy = line.grouped[copy].turned or copy
                    own = j if copy is None else copies.setdefault(copy, count + len(copies))
                    found.add(roots[j] or frozenset((own,)))
        alive[i] = used
        if fusible:
            every = next(iter(found)) if len(found) == 1 else _NONE.union(*found)
            roots[i] = every if len(every) <= _ROOTS else frozenset(sorted(every)[:_ROOTS])


def _find_repeated(line: Line) -> None:
    """Notes what one kernel would compute many times over, each time at other places.

    Element-wise work reads a value where it is itself computed, so all that is read at the same
    places counts once. A slice reads a part of it at places of its own, and what joins or pads
    values reads each so: as often as those are computed, it is. So XLA counts (utilization):

        odd = scan(x[::2] + x[1::2])    y = join(odd, odd + x[2::2])    odd twice, and so on inside
    """
    # By instruction, the readers, with the operand, that read it at places of their own, and how
    # often each does for one item of the result. The kernel itself is (its instruction, _ITSELF).
    places: dict[int, dict[tuple[int, int], float]] = {}
    for i in range(len(line.ops) - 1, -1, -1):
        op, own = line.ops[i], dict[tuple[int, int], float]()
        readers = {j for m in line.makes[i] for j in line.readers.get(m, ()) if line.alive[j]}
        for j in readers if len(line.roots[i]) == 1 else ():
            reader = line.ops[j]
            if not line.roots[j]:
                own[j, _ITSELF] = 1.0
            elif reader is not None and reader.rule is not None and reader.rule.is_elementwise:
                own.update(places[j])
            else:
                share = _share_read(op, reader) * sum(places[j].values())
                own.update(
                    ((j, k), share) for k, n in enumerate(line.reads[j]) if n in line.makes[i]
                )
        if op is not None and sum(n for (_, k), n in own.items() if k != _ITSELF) >= _MANY_TIMES:
            line.repeated.add(i)
            own = {}
        places[i] = own or {(i, _ITSELF): 1.0}


def _share_read(op: Op | None, reader: Op | None) -> float:
    """Of the items of a result, the share that a reader takes."""
    if op is None or reader is None or reader.kind not in _CUTTING:
        return 1.0
    return min(1.0, reader.results[0].item_count / max(1, op.results[0].item_count))


_CUTTING = frozenset({"slice", "split", "dynamic_slice"})
