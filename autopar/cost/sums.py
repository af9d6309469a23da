"""The sums that a part adds its results to: by the kernels that make these, or by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.kernels import ADDING, Kernel, Pieces, Stored
from autopar.cost.ops import is_product
from autopar.cost.sizes import Sizes
from autopar.ir.added_products import added_products
from autopar.ir.batching import Accumulator
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, Listing, LocalOp
from autopar.ir.values import item_bytes


@dataclass(frozen=True)
class AddedSums:
    """The bytes of the sum that each piece is added to.

    Matrix products BLAS adds to what their buffer holds, so that nobody stores them, nor the
    `views` of them: the product stands for these. CPUs add products up apart. The bytes of what is
    `widened` are those of the sum that it comes into.
    """

    nbytes: Mapping[str, int] = field(default_factory=dict[str, int])
    products: Pieces = frozenset()
    views: Pieces = frozenset()
    widened: Mapping[str, int] = field(default_factory=dict[str, int])

    def adds(self, kernel: Kernel) -> bool:
        """True if a kernel adds what it makes to sums itself: element-wise work always does."""
        return kernel.is_light or not self.products.isdisjoint(kernel.makes)

    def with_adding(self, stored: Stored, block: Block, sizes: Sizes) -> Stored:
        """The kernels, and one for each sum that no other adds to.

        What a convolution makes XLA for GPUs turns over on the way, into a buffer beside the sum.
        """
        kernels, behind = list(stored.kernels), dict(stored.behind)
        nbytes = {name: self.widened.get(name, n) for name, n in stored.nbytes.items()}
        for kernel in stored.kernels:
            step = kernel.instruction(block)
            kind = sizes.op(step.equation).kind if isinstance(step, LocalOp) else ""
            turns = sizes.platform == "gpu" and kind == "conv_general_dilated"
            for name in () if self.adds(kernel) else kernel.makes:
                if (added := self.nbytes.get(name)) is not None:
                    beside = added if turns else 0
                    made = f"sum of {name}"
                    kernels.append(Kernel(ADDING, (made,), frozenset((name,)), beside))
                    nbytes[made] = added
                    behind[name] = frozenset((made,))
        return replace(stored, kernels=tuple(kernels), nbytes=nbytes, behind=behind)


def added_sums(
    graph: Graph, listing: Listing, sizes: Sizes, sums: Sequence[Accumulator]
) -> AddedSums:
    """Reads which pieces of a part's listing are added to which sums."""
    dtype_of = {a.value: a.dtype for a in sums if a.combiner != "same"}
    nbytes: dict[str, int] = {}
    rows = zip(graph.outputs, listing.block.outputs, listing.output_shardings, strict=True)
    for name, piece, sharding in rows:
        if isinstance(name, str) and name in dtype_of and piece is not None:
            value = graph.values[name]
            item = item_bytes(dtype_of[name] or value.dtype)
            nbytes[piece] = sizes.of(value, sharding) // item_bytes(value.dtype) * item
    products, views, widened = set[str](), set[str](), dict[str, int]()
    for added in added_products(graph, listing, sums):
        first, *later = added.pieces
        held = nbytes[added.pieces[-1]]
        widened.update(dict.fromkeys(added.pieces, held))
        if sizes.platform != "cpu" and is_product(sizes.op(added.equation)):
            nbytes[first] = nbytes.pop(added.pieces[-1])
            products.add(first)
            views.update(later)
    return AddedSums(nbytes, frozenset(products), frozenset(views), widened)
