"""Matrix products of one value that XLA for GPUs makes one product of, and what that saves.

    q = x @ wq    k = x @ wk    v = x @ wv    =>    qkv = x @ concatenate(wq, wk, wv)

One product fills the chip better than three small ones, and loads x once. But what the three read
beside x is copied side by side first, and all of it is waited for. A product that is only cast, as
a gradient is to f32, XLA writes in that dtype at once, if it is not merged; its model of GPUs has
no figures of such products, and schedules them as if they took much longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost.kernels import COPY, Kernel, Stored
from autopar.cost.ops import is_product
from autopar.cost.order import in_order
from autopar.cost.prices import Prices
from autopar.cost.sizes import Sizes, product_dims
from autopar.ir.graph import Op
from autopar.ir.listing import Block, LocalOp, Loop, names_made, names_read

# XLA merges two products if what one of them reads and makes takes no more (DotMerger).
_MOST_BYTES = 64 << 20
# What merging is to save of a step. A product that waits for all that it reads leaves less to run
# beside collectives, which by XLA's timelines of H100s cost six models 1 to 2.5 % more than told.
_LEAST_SAVED = 0.02
# XLA's timeline of H100s has 3.2 ms for what is 0.1 ms by its own table of products in one dtype.
_TIMES_CAST = 25


def pays_to_merge(block: Block, prices: Prices, sizes: Sizes, seconds: float) -> bool:
    """True if XLA had better merge the products of a step that takes so many seconds."""
    return seconds_saved_by_merging(block, prices, sizes) > _LEAST_SAVED * seconds


def seconds_saved_by_merging(block: Block, prices: Prices, sizes: Sizes) -> float:
    """Seconds that XLA saves in a run of a block by merging products; below 0 if it loses some."""
    saved = sum(group.seconds_saved(prices) for group in products_alike(block, sizes))
    for step in block.instructions:
        if isinstance(step, Loop):
            bodies = (seconds_saved_by_merging(body, prices, sizes) for body in step.bodies)
            saved += step.runs * sum(bodies)
    return saved


def with_products_merged(stored: Stored, groups: Iterable[AlikeProducts]) -> Stored:
    """The kernels of a block, those of products that XLA merges joined, in an order that can run.

    What they read beside the shared operand is copied side by side. Their results are one piece,
    out of which products, collectives and what the block gives back have theirs cut:

        qkv = x @ (wq | wk | wv)    y = f(qkv)    k = cut(qkv)    s = q @ k
    """
    makers = {kernel.makes[0]: k for k, kernel in enumerate(stored.kernels)}
    kernels, nbytes, piece_of = list(stored.kernels), dict(stored.nbytes), dict[str, str]()
    added = list[Kernel]()
    for group in groups:
        found = [p for p in group.products if p.name in makers]
        if len(found) < 2:  # in another kernel, as before gelu
            continue
        own = [kernels[makers[p.name]] for p in found]
        shared = own[0].reads.intersection(*(kernel.reads for kernel in own))
        name = f"{found[0].name} and {len(found) - 1} more"
        beside = f"{name} read"
        nbytes[name] = sum(p.made for p in found)
        nbytes[beside] = sum(p.read[1 - group.shared] for p in found)
        others = frozenset[str]().union(*(kernel.reads for kernel in own)) - shared
        added += [
            Kernel(COPY, (beside,), others, is_light=True),
            replace(own[0], makes=(name,), reads=shared | {beside}, scratch_bytes=0),
        ]
        for p in found:
            piece_of[p.name] = name
            kernels[makers[p.name]] = replace(own[0], makes=())
    if not piece_of:
        return stored
    cut = {
        name for kernel in kernels if not kernel.is_light for name in piece_of.keys() & kernel.reads
    }.union(piece_of.keys() & stored.kept)
    added += [Kernel(COPY, (n,), frozenset((piece_of[n],)), is_light=True) for n in sorted(cut)]
    for k, kernel in enumerate(kernels):
        if kernel.is_light and not kernel.reads.isdisjoint(piece_of):
            reads = frozenset(piece_of.get(name, name) for name in kernel.reads)
            kernels[k] = replace(kernel, reads=reads)
    left = [kernel for kernel in (*kernels, *added) if kernel.makes]
    return in_order(replace(stored, kernels=tuple(left), nbytes=nbytes))


@dataclass(frozen=True)
class _Product:
    """A matrix product of a device's pieces, its `number`, and bits of those that it `waits_for`.

    `dims` are its batches, rows, columns and terms; its operands' bytes are `read`. Nothing reads
    one that `is_cast` but a cast to another dtype.
    """

    op: Op
    name: str
    is_cast: bool
    dims: tuple[int, int, int, int]
    number: int
    waits_for: int
    read: tuple[int, int]
    made: int

    @property
    def nbytes(self) -> int:
        """Bytes that it loads and stores."""
        return sum(self.read) + self.made


@dataclass(frozen=True)
class AlikeProducts:
    """Products that are merged, all of which read the same as their operand `shared`."""

    shared: int
    products: Sequence[_Product]

    def seconds_saved(self, prices: Prices) -> float:
        """Seconds that one product saves, with the copies that it takes."""
        own = 1 - self.shared
        first, *others = self.products
        dims = list(first.dims)
        dims[1 + own] += sum(p.dims[1 + own] for p in others)
        nbytes = first.nbytes + sum(p.nbytes - p.read[self.shared] for p in others)
        copied = sum(2 * p.read[own] for p in self.products)
        apart = sum(
            prices.product(p.op, p.nbytes, p.dims) * (_TIMES_CAST if p.is_cast else 1)
            for p in self.products
        )
        return apart - prices.product(first.op, nbytes, dims) - prices.elementwise(copied)


# What products that are merged have alike: the operand, the dtype, and the roles of its dims.
_Key = tuple[str | None, str, tuple[tuple[bool, bool], ...]]


@dataclass(frozen=True)
class _Found:
    """The groups of products of a block, which its time and its memory both ask for."""

    groups: tuple[AlikeProducts, ...]


def products_alike(block: Block, sizes: Sizes) -> Sequence[AlikeProducts]:
    """The products of a block that XLA merges, each with the first that reads the same."""
    return sizes.once(_Found, block, {}, lambda: _Found((*_alike(block, sizes),))).groups


def _alike(block: Block, sizes: Sizes) -> Iterator[AlikeProducts]:
    alike: dict[tuple[int, _Key], list[_Product]] = {}
    for product, shared, key in _readings(block, sizes):
        alike.setdefault((shared, key), []).append(product)
    merged = set[int]()
    for (shared, _), products in alike.items():
        left = [p for p in products if p.number not in merged]
        while left:
            first, *others = left
            group, left = [first], list[_Product]()
            bits, nbytes = 1 << first.number, first.nbytes
            for other in others:
                if min(nbytes, other.nbytes) <= _MOST_BYTES and not other.waits_for & bits:
                    group.append(other)
                    bits |= 1 << other.number
                    nbytes += other.nbytes - other.read[shared]
                else:
                    left.append(other)
            if len(group) > 1:
                merged.update(p.number for p in group)
                yield AlikeProducts(shared, group)


def _readings(block: Block, sizes: Sizes) -> Iterator[tuple[_Product, int, _Key]]:
    """Each product of a block with each of its operands, and a key that mergeable ones share."""
    cast_alone = _cast_alone(block, sizes)
    behind: dict[str | None, int] = {}  # the products that a piece is computed from, as bits
    original: dict[str | None, str] = {}  # of a cast, the value and the dtype
    count = 0
    for step in block.instructions:
        bits = 0
        for name in names_read(step):
            bits |= behind.get(name, 0)
        op = sizes.op(step.equation) if isinstance(step, LocalOp) else None
        if isinstance(step, LocalOp) and op is not None:
            if op.kind == "convert_element_type" and (name := step.operands[0]) is not None:
                original[step.results[0]] = f"{original.get(name, name)} as {op.results[0].dtype}"
            dims = product_dims(op, step, sizes) if is_product(op) else None
            if dims is not None:
                left, right = (sizes.operand(step, op, k) for k in (0, 1))
                made = sizes.of(op.results[0], step.result_shardings[0])
                is_cast = step.results[0] in cast_alone
                product = _Product(
                    op, step.results[0], is_cast, dims, count, bits, (left, right), made
                )
                for o, operand in enumerate(step.operands):
                    key = original.get(operand, operand), op.results[0].dtype, tuple(_roles(op, o))
                    yield product, o, key
                bits |= 1 << count
                count += 1
        behind.update(dict.fromkeys(names_made(step), bits))


def _cast_alone(block: Block, sizes: Sizes) -> set[str]:
    """The pieces that nothing reads but a cast, be it of their transpose."""
    reads = Counter(name for step in block.instructions for name in names_read(step))
    reads.update(block.outputs)
    found = set[str]()
    for step in reversed(block.instructions):
        op = sizes.op(step.equation) if isinstance(step, LocalOp) else None
        if not isinstance(step, LocalOp) or op is None or not step.operands:
            continue
        name = step.operands[0]
        is_turned = op.kind in ("reshape", "transpose") and step.results[0] in found
        if name is not None and reads[name] == 1:
            if op.kind == "convert_element_type" or is_turned:
                found.add(name)
    return found


def _roles(op: Op, operand: int) -> Iterator[tuple[bool, bool]]:
    """For each dim of a product's operand, whether the other one has it, and whether it is kept."""
    assert op.rule is not None
    other, kept = set(op.rule.operands[1 - operand]), set(op.rule.results[0])
    yield from ((dim in other, dim in kept) for dim in op.rule.operands[operand])
