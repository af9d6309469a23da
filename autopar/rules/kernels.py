"""Rules of hand-written kernels: dims that the kernel's grid goes through block by block pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import WHOLE, Factors, Primitive, items, optional, pairs, unknown_rule


def _pallas_call(op: Op, operands: Sequence[Value]) -> Rule:
    """A factor for each dim of the grid whose blocks are computed apart, as the front end found.

    Where it found none the kernel is code that we cannot see into.
    """
    apart = optional(op, "grid_apart")
    if not apart:
        return unknown_rule(op, operands)
    found = Factors()
    values = (*operands, *op.results)
    tensors: list[list[Dim]] = [[WHOLE] * len(v.shape) for v in values]
    for dims in items(apart):
        places = pairs(dims)
        tensor, dim, block = places[0]
        blocks = found.new(values[tensor].shape[dim] // block)
        for tensor, dim, block in places:
            inside = found.new(block, Kind.REPLICATE) if block > 1 else ()
            tensors[tensor][dim] = blocks + inside
    return found.rule(tensors[: len(operands)], tensors[len(operands) :])


PRIMITIVES: Mapping[str, Primitive] = {"pallas_call": Primitive(_pallas_call, local=True)}
