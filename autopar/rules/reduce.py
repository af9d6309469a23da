"""Rules of reductions, running sums, sorts and selections along a dim.

reduce_sum  (a b) -> (a)      b is reduced: the shards are partial sums, added at last
argmax      (a b) -> (a)      b must be whole: a shard alone does not know the position
cumsum      (a b) -> (a b)    b must be whole: each item needs all those before it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Factor, Kind, Rule
from autopar.ir.values import Value
from autopar.rules.primitive import Factors, Fusion, Primitive, Work, alike

_WHOLE = Factor(1, Kind.REPLICATE)


def combiner_factor(dtype: str, combiner: str) -> Factor:
    """The effect of sharding a reduced dim: partial results, or, where none can combine, whole.

    Booleans combine by "or" and "and"; those two fit nothing else, for which they act on bits.
    No two complex numbers compare as they reduce.
    """
    if dtype == "bool":
        combiner = {"max": "or", "min": "and"}.get(combiner, combiner)
        return Factor(1, Kind.REDUCE, combiner) if combiner in ("or", "and") else _WHOLE
    if combiner == "sum" or (combiner in ("max", "min") and not dtype.startswith("c")):
        return Factor(1, Kind.REDUCE, combiner)
    return _WHOLE


def _reduce(op: Op, operands: Sequence[Value], *, combiner: str) -> Rule:
    found = Factors()
    axes = op.ints("axes")
    reduced = combiner_factor(operands[0].dtype, combiner)
    dims = [  # a dim of 1 has nothing to reduce: leaving it out renames the others
        found.new(n, reduced.kind, reduced.combiner) if d in axes and n != 1 else found.new(n)
        for d, n in enumerate(operands[0].shape)
    ]
    kept = [f for d, f in enumerate(dims) if d not in axes]
    return found.rule([dims], [kept], [(0,)] if combiner == "sum" else ())


def _pick(op: Op, operands: Sequence[Value]) -> Rule:
    """Position of the extreme: a shard alone does not know it."""
    return _reduce(op, operands, combiner="position")


def _reduce_any(op: Op, operands: Sequence[Value]) -> Rule:
    """Any computation over several operands, which nobody promised to be associative."""
    found = Factors()
    axes = op.ints("dimensions")
    arrays = operands[: len(operands) // 2]
    dims = [
        found.new(n, Kind.REPLICATE if d in axes else Kind.PASS)
        for d, n in enumerate(arrays[0].shape)
    ]
    kept = [f for d, f in enumerate(dims) if d not in axes]
    starts: list[list[Dim]] = [[] for _ in arrays]
    return found.rule([*[dims] * len(arrays), *starts], [kept] * len(op.results))


def _along(op: Op, operands: Sequence[Value], *, param: str, linear: bool = False) -> Rule:
    """Lets all dims pass but the one that a parameter names."""
    found = Factors()
    shape = operands[0].shape
    axis = op.whole(param) % len(shape)
    dims = [found.new(n, Kind.REPLICATE if d == axis else Kind.PASS) for d, n in enumerate(shape)]
    size = op.results[0].shape[axis]
    after = dims if size == shape[axis] else [*dims[:axis], found.whole(size), *dims[axis + 1 :]]
    return found.rule([dims] * len(operands), [after] * len(op.results), [(0,)] if linear else ())


_COMBINERS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_prod": "product",
    "reduce_xor": "parity",
}

PRIMITIVES: Mapping[str, Primitive] = {
    **{
        name: Primitive(
            partial(_reduce, combiner=combiner),
            Work.READS,
            Fusion.REDUCTION,
            keeps_zero=combiner == "sum",
        )
        for name, combiner in _COMBINERS.items()
    },
    **alike(["argmax", "argmin"], Primitive(_pick, Work.READS, Fusion.REDUCTION)),
    **alike(
        ["cumlogsumexp", "cummax", "cummin", "cumprod"],
        Primitive(partial(_along, param="axis"), Work.READS, Fusion.KERNEL),
    ),
    "approx_top_k": Primitive(partial(_along, param="reduction_dimension"), fusion=Fusion.KERNEL),
    "cumsum": Primitive(partial(_along, param="axis", linear=True), Work.READS, Fusion.KERNEL),
    "reduce": Primitive(_reduce_any, fusion=Fusion.REDUCTION),
    "sort": Primitive(partial(_along, param="dimension"), Work.READS, Fusion.KERNEL),
    "top_k": Primitive(partial(_along, param="axis"), Work.READS, Fusion.KERNEL),
}
