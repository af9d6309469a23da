"""Model FLOPs: the products that a step cannot do without, recomputation left out.

    forward   y = x w                2 b k n
    backward  dx = dy w', dw = x' dy 4 b k n
    remat     y = x w once more      not counted: the forward pass has it

This is what model FLOPs utilization is measured by (Chowdhery et al., "PaLM", appendix B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.ir.graph import Graph, Op
from autopar.rules import HEAVY


def model_flops(graph: Graph) -> tuple[int, str]:
    """The FLOPs of a step's products on all rows, and the dtype that most of them are in."""
    products = list(_products(graph, 1))
    forward = {_key(op) for op, _ in products if op.origin.region == "forward"}
    by_dtype = Counter[str]()
    for op, runs in products:
        # A product of the backward pass that is one of the forward pass is a recomputation.
        if op.origin.region != "backward" or _key(op) not in forward:
            by_dtype[op.results[0].dtype] += op.flops * runs
    (dtype, _), *_ = by_dtype.most_common(1) or [("f32", 0)]
    return by_dtype.total(), dtype


def _products(graph: Graph, runs: int) -> Iterator[tuple[Op, int]]:
    """The products, those of bodies too, with how often a step runs them."""
    for op in graph.ops:
        often = runs * op.runs
        flow = op.control_flow
        if flow is None and op.kind in HEAVY:
            yield op, often
        elif flow is not None:
            trips = max(1, flow.trips) if flow.kind == "scan" else 1
            for body in op.graphs:
                yield from _products(body, often * trips)


def _key(op: Op) -> tuple[object, ...]:
    types = tuple((v.shape, v.dtype) for v in op.results)
    return op.kind, op.params, op.origin.line, types, op.flops
