"""Kernels that so few blocks of a GPU run that these cannot load what its memory could give.

XLA's model of a GPU has a block load 32 bytes a clock, from memory or from a cache. Two kinds of
kernels of models that are not wide have few:

1. Sums over rows. A bias's gradient is summed up over [rows, columns] by blocks that take so many
   columns each, from the first row to the last. Element-wise work that reads the same rows runs in
   the same kernel (multi-output fusion), and so in as few blocks, unless Triton runs it. Numbers of
   a row or of a column, such as a mean, are loaded anew for each item:

       g = f(dy, x, mean)   s = sum(dy)       [4096, 1024] bf16: 8 blocks, 0.5 TB/s on an H100

   Where the columns lie outermost in memory, each is a row of its own, and has a block of its own.
   Else a plan has such a sum made in parts first, by a kernel of more blocks: `in_parts`.
2. Scatters: a thread for each item that is put somewhere, whatever the size of what it is put into.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from autopar.cost.kernels import Kernel, Stored
from autopar.cost.ops import (
    is_fused_into_readers,
    is_reduction,
    is_scatter,
    operand_shape,
    sums_up_batches,
)
from autopar.cost.reshard import CollectivePrices
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Op
from autopar.ir.listing import Block, Fence, LocalOp, Loop, Move, names_made
from autopar.ir.values import item_bytes as item_size
from autopar.rules import primitive

# A block takes the columns that a warp's 32 lanes load at once, 8 bytes each. XLA splits longer
# columns, for the sake of more blocks (its TreeReductionRewriter).
_BLOCK_BYTES, _LONGEST_COLUMN = 32 * 8, 4096
_THREADS = 128  # of a block
_FEWEST_ROWS = 8  # of a part of a sum
_BESIDE = 4  # times its bytes, that the kernel of a sum loads with work and numbers beside it
_NUMBER_BYTES = 4  # of a row or a column: sums are f32
_SAME = frozenset({"convert_element_type", "neg"})


@dataclass(frozen=True)
class FewBlocks:
    """The bytes that a kernel loads in so few blocks, and those that it stores.

    A sum that runs with other work has none of its own.
    """

    loaded: int
    count: int
    stored: int = 0


@dataclass(frozen=True)
class _Sum:
    """A sum over the rows of [..., columns], in blocks; it `reads` "" where that is computed."""

    shape: tuple[int, ...]
    reads: str
    blocks: int

    @property
    def items(self) -> int:
        """The number of items that it adds up."""
        return math.prod(self.shape)


class BlockCounts:
    """Finds the kernels of a block that run in few blocks of a GPU: in less than `filling`."""

    def __init__(self, block: Block, sizes: Sizes, stored: Stored, filling: float) -> None:
        self._block, self._sizes, self._stored, self._filling = block, sizes, stored, filling
        self._outermost = columns_outermost(block, sizes)
        self._runs = {
            s.results[0]: s for s in block.instructions if isinstance(s, LocalOp) and s.results
        }

    def found(
        self,
        shared: Mapping[int, tuple[int, frozenset[str]]],
        along_rows: Collection[tuple[str, ...]],
    ) -> Mapping[tuple[str, ...], FewBlocks]:
        """The kernels, by what they make; `shared` is what `at_hand` tells of them.

        Those `along_rows` may be Triton's, with which no sum of columns runs.
        """
        kernels = self._stored.kernels
        sums = {k: own for k, kernel in enumerate(kernels) if (own := self._sum(kernel))}
        scatters = ((kernel.makes, self._put(kernel)) for kernel in kernels)
        found = {makes: few for makes, few in scatters if few is not None}
        readers = self._readers({own.reads for own in sums.values() if own.reads}, along_rows)
        beside: dict[int, list[_Sum]] = {}  # by the first of element-wise kernels that run as one
        for k, own in sums.items():
            reader = readers.get((own.reads, own.shape))
            fills = own.blocks >= self._filling
            if reader is not None and not fills:
                beside.setdefault(shared.get(reader, (reader,))[0], []).append(own)
            if reader is not None:
                found[kernels[k].makes] = FewBlocks(0, own.blocks)
            elif not fills:
                # What is computed was written for sums along the rows, which need it as well.
                loaded = self._bytes(own.reads) if own.reads else own.items * _NUMBER_BYTES
                found[kernels[k].makes] = FewBlocks(loaded, own.blocks)
        together: dict[int, list[Kernel]] = {}
        for k, kernel in enumerate(kernels):
            first = shared.get(k, (k,))[0]
            if first in beside:
                together.setdefault(first, []).append(kernel)
        for first, joined in together.items():
            blocks = min(own.blocks for own in beside[first])
            found |= {kernel.makes: FewBlocks(0, blocks) for kernel in joined}
            reads = frozenset[str]().union(*(kernel.reads for kernel in joined))
            makes = [name for kernel in joined for name in kernel.makes]
            loaded = self._loaded(reads.difference(makes), makes, beside[first][0].items)
            loaded += sum(self._bytes(own.reads) for own in beside[first])
            found[kernels[first].makes] = FewBlocks(loaded, blocks, sum(map(self._bytes, makes)))
        return found

    def _bytes(self, name: str) -> int:
        return self._stored.nbytes.get(name, 0)

    def _sum(self, kernel: Kernel) -> _Sum | None:
        """A sum over all dims but the last, of columns that are not split."""
        step = kernel.instruction(self._block)
        op = self._sizes.op(step.equation) if isinstance(step, LocalOp) else None
        if not isinstance(step, LocalOp) or op is None or not is_reduction(op):
            return None
        if step.operands[0] in self._outermost or not _sums_rows(op):
            return None
        shape = self._sizes.shard(step, op)
        items = math.prod(shape)
        large = [r for r in sorted(kernel.reads) if self._bytes(r) >= items]
        reads = large[0] if len(large) == len(kernel.reads) == 1 else ""
        item_bytes = max(1, self._bytes(reads) // items) if reads else _NUMBER_BYTES
        blocks = _blocks(shape, item_bytes) * math.prod(step.parts)
        is_whole = 1 < math.prod(shape[:-1]) <= _LONGEST_COLUMN
        is_few = blocks < self._filling or bool(step.parts)
        return _Sum(shape, reads, blocks) if is_whole and is_few else None

    def scatter(self, kernel: Kernel) -> tuple[LocalOp, Op] | None:
        """The scatter that a kernel is, or that it has inside to add what is put to a sum."""
        step = kernel.instruction(self._block)
        if not isinstance(step, LocalOp):
            return None
        inside = (self._runs.get(n) for n in step.operands if n is not None and not self._bytes(n))
        for run in (step, *inside):
            op = self._sizes.op(run.equation) if run is not None else None
            if run is not None and op is not None and is_scatter(op):
                return run, op
        return None

    def _put(self, kernel: Kernel) -> FewBlocks | None:
        """A scatter; it loads and stores all that it puts items into."""
        found = self.scatter(kernel)
        if found is None or len(found[0].operands) < 3:
            return None
        put = self._sizes.shard(*found, 2)
        blocks = math.ceil(math.prod(put) / _THREADS)
        nbytes = sum(map(self._bytes, kernel.makes))
        return FewBlocks(nbytes, blocks, nbytes) if blocks < self._filling else None

    def _readers(
        self, names: Set[str], along_rows: Collection[tuple[str, ...]]
    ) -> Mapping[tuple[str, tuple[int, ...]], int]:
        """The first element-wise kernel that reads a piece, by the piece and the kernel's shape."""
        found: dict[tuple[str, tuple[int, ...]], int] = {}
        for k, kernel in enumerate(self._stored.kernels):
            wanted = names & kernel.reads
            step = kernel.instruction(self._block)
            if not wanted or not isinstance(step, LocalOp):
                continue
            op = self._sizes.op(step.equation)
            is_by_triton = kernel.makes in along_rows and self._closes_a_diamond(kernel)
            if is_fused_into_readers(op) and not is_by_triton:
                shape = self._sizes.made(step, op)
                for name in sorted(wanted):
                    found.setdefault((name, shape), k)
        return found

    def _closes_a_diamond(self, kernel: Kernel) -> bool:
        """True if a kernel joins a sum of each row with what it is a sum of.

        XLA looks for that (its SoftmaxRewriterTriton) where it gives work on rows to Triton:

            x -------------------- x - mean
              `-- sum -- mean --`
        """
        seen, waiting = set[str](), [*kernel.makes]
        while waiting:
            run = self._runs.get(waiting.pop())
            names = [n for n in run.operands if n is not None] if run is not None else []
            if len(names) == 2 and any(
                self._plain(one) == self._plain(self._summed(other))
                for one, other in (names, names[::-1])
            ):
                return True
            unstored = [n for n in names if n not in seen and n not in self._stored.nbytes]
            seen.update(unstored)
            waiting += unstored
        return False

    def _summed(self, name: str) -> str:
        """The value whose sums of rows are spread to make another, or "" where it is no such."""
        while run := self._runs.get(name):
            names = [n for n in run.operands if n is not None]
            if len(names) != 1:
                return ""
            if is_reduction(self._sizes.op(run.equation)):
                return names[0]
            name = names[0]
        return ""

    def _plain(self, name: str) -> str:
        """The value that another is a cast or the negative of."""
        while (run := self._runs.get(name)) and self._sizes.op(run.equation).kind in _SAME:
            (name,) = (n for n in run.operands if n is not None)
        return name

    def _loaded(self, reads: Set[str], makes: Sequence[str], items: int) -> int:
        """Bytes that element-wise work loads; numbers of rows or columns, for each of its items."""
        large = sum(n for n in map(self._bytes, reads) if n >= items)
        numbers, seen, waiting = 0, set[str](), [*makes]
        while waiting:
            run = self._runs.get(waiting.pop())
            op = self._sizes.op(run.equation) if run is not None else None
            if run is None or op is None:
                continue
            is_whole = math.prod(self._sizes.made(run, op)) == items
            for k, name in enumerate(run.operands):
                own = math.prod(operand_shape(op, k))
                if is_whole and own < math.prod(op.results[0].shape):  # is spread over the items
                    numbers += own > 1
                elif name is not None and name not in seen and name not in self._stored.nbytes:
                    seen.add(name)
                    waiting.append(name)
        return large + _NUMBER_BYTES * items * numbers


def _sums_rows(op: Op) -> bool:
    """True if all dims but the last are summed up."""
    if op.rule is None or not op.rule.operands or not op.rule.operands[0]:
        return False
    *rows, columns = op.rule.operands[0]
    kept = {f for dim in op.rule.results[0] for f in dim}
    return kept.issuperset(columns) and not any(kept & {*dim} for dim in rows)


def _blocks(shape: Sequence[int], item_bytes: int) -> int:
    """The blocks among which XLA divides the columns of a sum of rows."""
    return math.ceil(shape[-1] * item_bytes / _BLOCK_BYTES)


def in_parts(block: Block, sizes: Sizes, prices: CollectivePrices) -> Mapping[str, tuple[int, ...]]:
    """The parts in which sums of rows are made first, by their results, where that takes less.

    The leading dims are kept, and of the next one as many parts as fill a GPU. No dims are joined:
    however a value lies, it is read as it lies.

        sum of [8, 28, 28, 64] in bf16, 1 block  ->  [8, 14] parts, 112 blocks; then their sum
    """
    found: dict[str, tuple[str | None, tuple[int, ...]]] = {}  # what is summed up, and the parts
    for step in block.instructions:
        op = sizes.op(step.equation) if isinstance(step, LocalOp) else None
        if not isinstance(step, LocalOp) or op is None or op.kind != "reduce_sum":
            continue
        if not op.results[0].is_floating or not _sums_rows(op):
            continue
        shape, item_bytes = sizes.shard(step, op), item_size(op.results[0].dtype)
        rows, loaded = math.prod(shape[:-1]), math.prod(shape) * item_bytes
        blocks = _blocks(shape, item_bytes)
        if not 1 < rows <= _LONGEST_COLUMN:
            continue
        # 1. So many parts that each still has some rows.
        parts, count = list[int](), 1
        wanted = min(math.ceil(_BESIDE * prices.filling_blocks / blocks), rows // _FEWEST_ROWS)
        for size in shape[:-1]:
            able = range(1, min(size, wanted // count) + 1)
            parts.append(max((n for n in able if size % n == 0), default=1))
            count *= parts[-1]
            if parts[-1] < size:
                break
        while parts and parts[-1] == 1:
            parts.pop()
        # 2. A kernel more sums them up.
        now, then = (prices.in_blocks(_BESIDE * loaded, n, 0) for n in (blocks, count * blocks))
        then = max(then, prices.elementwise(loaded))
        if then + prices.elementwise(2 * _NUMBER_BYTES * count * shape[-1]) < now:
            found[step.results[0]] = step.operands[0], tuple(parts)
    # 3. Not of columns that have a block each.
    outermost = columns_outermost(block, sizes) if found else frozenset[str]()
    return {name: parts for name, (summed, parts) in found.items() if summed not in outermost}


# How much it counts where a value's dims lie: a product of batches has them as it wishes, where its
# batches do not stay outermost. XLA for GPUs gathers and scatters along the outermost dim. Other
# products of batches follow these, and an all-to-all follows all of them.
_BATCHES, _ALONG, _SIDES, _ACROSS = 4, 3, 2, 1


def columns_outermost(block: Block, sizes: Sizes) -> frozenset[str]:
    """The values whose last dim does not lie innermost: a collective wants it outermost.

    Values that element-wise work ties together lie alike. The first of those told alike counts.
    """
    tied: dict[str, str] = {}

    def root(name: str) -> str:
        while (up := tied.get(name, name)) != name:
            tied[name] = tied.get(up, up)
            name = up
        return name

    told: list[tuple[str, int, bool]] = []
    turned = {
        s.operands[0]: op.ints("permutation")
        for s in block.instructions
        if isinstance(s, LocalOp) and (op := sizes.op(s.equation)).kind == "transpose"
    }
    for step in block.instructions:
        if isinstance(step, Move):
            tied[root(step.source)] = root(step.result)
            told += [(step.result, *wish) for wish in _wishes(step)]
        elif isinstance(step, Fence):
            for source, result in zip(step.sources, step.results, strict=False):
                tied[root(source)] = root(result)
        elif isinstance(step, LocalOp):
            op = sizes.op(step.equation)
            if sums_up_batches(op):
                permutation = turned.get(step.results[0], ())
                moves = _batches_move(op, sizes.made(step, op), permutation)
                told.append((step.results[0], _BATCHES if moves else _SIDES, moves))
            for k, name in enumerate(step.operands):
                if name is not None and _lies_alike(op, k):
                    tied[root(name)] = root(step.results[0])
    best: dict[str, tuple[int, bool]] = {}
    for name, weight, is_outermost in told:
        at = root(name)
        if at not in best or weight > best[at][0]:
            best[at] = weight, is_outermost
    made = (names_made(s) for s in block.instructions if not isinstance(s, Loop))
    names = {*block.inputs, *(n for results in made for n in results)}
    return frozenset(n for n in names if best.get(root(n), (0, False))[1])


def _batches_move(op: Op, made: Sequence[int], permutation: Sequence[int]) -> bool:
    """True if a product's dims of batch come to lie inside of its rows or columns.

    Its rows and columns are stored in the order that is wished for, its batches lie outermost.
    """
    assert op.rule is not None
    left, right = (set(dims) for dims in op.rule.operands)
    batches = [d for d, dim in enumerate(op.rule.results[0]) if dim in left and dim in right]
    long = [d for d in permutation if made[d] > 1]
    return [d for d in long if d in batches] != long[: sum(made[d] > 1 for d in batches)]


def _wishes(move: Move) -> list[tuple[int, bool]]:
    """The wishes of collectives: how much each counts, and if the last dim is to lie outermost."""
    last = len(move.value.shape) - 1
    found = list[tuple[int, bool]]()
    for step in move.steps:
        if step.kind in ("all-gather", "reduce-scatter"):
            found.append((_ALONG, step.dim == last))
        elif step.kind == "all-to-all" and last in (step.dim, step.to_dim):
            found.append((_ACROSS, True))
    return found


def _lies_alike(op: Op, operand: int) -> bool:
    """True if an op's only result lies as an operand does: it has the same items."""
    rule = op.rule
    if rule is None or operand >= len(rule.operands) or len(op.results) != 1:
        return False
    if rule.is_elementwise and rule.operands[operand] == rule.results[0]:
        return not op.graphs
    moves = primitive(op.kind).moves and primitive(op.kind).picks is None
    return moves and math.prod(operand_shape(op, operand)) == math.prod(op.results[0].shape)
