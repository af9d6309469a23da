"""Matrix products that a part only adds to its sums, so that they are made as wide as these are.

    %4 = dot_general %1, %2     bf16    is made in f32: BLAS adds it to what the sum holds
    %5 = transpose %4           bf16    is a view of it
    sum of %5                   f32

The product is not rounded before it is added, as that of the whole batch is not rounded within.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.batching import Accumulator
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing, LocalOp, names_read

_VIEWS = frozenset({"reshape", "squeeze", "transpose"})
_ROUNDING, _WIDEST = "convert_element_type", "f32"
_WIDENED = frozenset({"bf16", "f16", _WIDEST})


@dataclass(frozen=True)
class AddedProduct:
    """A product, by its equation, and the pieces from it to what is added to a sum.

    Each but the last is read once, by the next. All are made in the sum's `dtype`.
    """

    equation: tuple[int, ...]
    pieces: tuple[str, ...]
    dtype: str


def added_products(
    graph: Graph, listing: Listing, sums: Sequence[Accumulator]
) -> Iterator[AddedProduct]:
    """The products of a part's graph that come into `sums` by views and casts alone."""
    if not sums:
        return
    block = listing.block
    makers = {r: s for s in block.instructions if isinstance(s, LocalOp) for r in s.results}
    count = Counter(name for step in block.instructions for name in names_read(step))
    count.update(name for name in block.outputs if name is not None)
    pieces = dict(zip(map(str, graph.outputs), block.outputs, strict=True))
    for added in sums:
        dtype = added.dtype or graph.values[added.value].dtype
        piece, path = pieces[added.value], list[str]()
        while added.combiner == "sum" and piece in makers and count[piece] == 1:
            path.insert(0, piece)
            op = graph.op_at(equation := makers[piece].equation)
            is_widened = dtype == _WIDEST and op.results[0].dtype in _WIDENED
            if op.kind == "dot_general" and (is_widened or op.results[0].dtype == dtype):
                yield AddedProduct(equation, tuple(path), dtype)
            if op.kind not in _VIEWS and not (op.kind == _ROUNDING and is_widened):
                break
            piece = makers[piece].operands[0]
