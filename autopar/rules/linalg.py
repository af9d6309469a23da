"""Rules of matrix factorizations, solves and transforms: batches pass, matrices stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from autopar.ir.graph import Op
from autopar.ir.rule import Rule
from autopar.ir.values import Value
from autopar.rules.primitive import Factors, Fusion, Primitive, alike


def batched(
    op: Op,
    operands: Sequence[Value],
    *,
    tail: int,
    linear: Sequence[Sequence[int]] = (),
) -> Rule:
    """Shares the batch dims, all but the last `tail` of the first operand, among the tensors."""
    found = Factors()
    shape = operands[0].shape
    batch = found.each(shape[: len(shape) - tail])

    def dims_of(value: Value) -> list[tuple[int, ...]]:
        return [*batch, *(found.whole(n) for n in value.shape[len(batch) :])]

    return found.rule([dims_of(v) for v in operands], [dims_of(v) for v in op.results], linear)


def _triangular_solve(op: Op, operands: Sequence[Value]) -> Rule:
    """Right-hand sides (columns of b, or rows where x stands left of a) are solved one by one."""
    matrix, sides = (v.shape for v in operands)
    found = Factors()
    batch = found.each(matrix[:-2])
    alone = found.new(sides[-1] if op.param("left_side") else sides[-2])
    # The order of a has one factor for each of its two dims: nothing may shard either.
    first, second = found.whole(matrix[-1]), found.whole(matrix[-1])
    pair = [first, alone] if op.param("left_side") else [alone, first]
    return found.rule([[*batch, first, second], [*batch, *pair]], [[*batch, *pair]], [(1,)])


def _fft(op: Op, operands: Sequence[Value]) -> Rule:
    return batched(op, operands, tail=len(op.ints("fft_lengths")), linear=[(0,)])


_MATRIX = """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur
    svd symmetric_product tridiagonal
""".split()

PRIMITIVES: Mapping[str, Primitive] = {
    **alike(_MATRIX, Primitive(partial(batched, tail=2), fusion=Fusion.KERNEL)),
    "fft": Primitive(_fft, fusion=Fusion.KERNEL, local=True),
    "lu_pivots_to_permutation": Primitive(partial(batched, tail=1)),
    "triangular_solve": Primitive(_triangular_solve, fusion=Fusion.KERNEL),
    "tridiagonal_solve": Primitive(partial(batched, tail=1, linear=[(3,)])),
}
