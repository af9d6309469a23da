"""Rules of element-wise primitives: one factor for each dim, shared by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.rule import Dim, Rule
from autopar.ir.values import Value, item_bytes
from autopar.rules.primitive import WHOLE, Factors, Fusion, Primitive, Work, alike

_UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor integer_pow is_finite lgamma log log1p log2 logistic not
    one_minus_square population_count reduce_precision round rsqrt sign sin sinh sqrt square tan
    tanh
""".split()
_BINARY = """
    and atan2 eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min ne
    nextafter or polygamma pow rem shift_left shift_right_arithmetic shift_right_logical xor zeta
""".split()
_MORE = ["clamp", "polynomial", "regularized_incomplete_beta"]
_SCALARS = ["platform_index"]  # the number of the platform's branch


def aligned(op: Op, operands: Sequence[Value], linear: Sequence[Sequence[int]] = ()) -> Rule:
    """A factor for each result dim; scalars and dims of 1 that broadcast carry nothing."""
    found = Factors()
    shape = op.results[0].shape
    dims = found.each(shape)
    given: list[list[Dim]] = []
    for value in operands:
        pairs = zip(value.shape, shape, dims, strict=True) if value.shape else ()
        given.append([d if n == size else WHOLE for n, size, d in pairs])
    return found.rule(given, [dims] * len(op.results), linear)


def _plain(op: Op, operands: Sequence[Value]) -> Rule:
    return aligned(op, operands)


def _first_linear(op: Op, operands: Sequence[Value]) -> Rule:
    return aligned(op, operands, [(0,)])


def _all_linear(op: Op, operands: Sequence[Value]) -> Rule:
    return aligned(op, operands, [range(len(operands))])


def _mul(op: Op, operands: Sequence[Value]) -> Rule:
    return aligned(op, operands, [(0,), (1,)])


def _div(op: Op, operands: Sequence[Value]) -> Rule:
    return aligned(op, operands, [(0,)] if op.results[0].is_floating else ())


def _select(op: Op, operands: Sequence[Value]) -> Rule:
    return aligned(op, operands, [range(1, len(operands))])


def _convert(op: Op, operands: Sequence[Value]) -> Rule:
    """Partial sums may widen; narrowed, each would be rounded on its own."""
    old, new = operands[0], op.results[0]
    wider = item_bytes(new.dtype) > item_bytes(old.dtype) or new.dtype == old.dtype
    return aligned(op, operands, [(0,)] if wider and old.is_floating and new.is_floating else ())


def _tie(op: Op, operands: Sequence[Value]) -> Rule:
    """The second operand, ordered after the first, which may lie anyhow but must be final."""
    found = Factors()
    first, second = found.each(operands[0].shape), found.each(operands[1].shape)
    return found.rule([first, second], [second], [(1,)])


def _each_own(op: Op, operands: Sequence[Value]) -> Rule:
    """Passes each operand through by itself."""
    del op
    found = Factors()
    dims = [found.each(v.shape) for v in operands]
    return found.rule(dims, dims, [range(len(operands))])


# An item of these costs more to compute again; `exp` has an instruction of its own.
_REDO_BYTES = {
    **dict.fromkeys("cos erf erf_inv erfc expm1 log log1p pow sin tanh".split(), 4.0),
    "logistic": 1.5, "exp": 1.0, "sqrt": 1.0, "rsqrt": 1.0,
}  # fmt: skip
# The bytes that an H100 could load while it computes an item of float32, by XLA's table of what its
# instructions take. A kernel with such work in it may take longer than its bytes do: gelu loads and
# stores 4 an item.
_GPU_BYTES = {
    "rsqrt": 3.9, "sqrt": 3.9, "exp": 4.5, "logistic": 4.9, "tanh": 9.9, "log": 12.3, "log1p": 13.4,
    "expm1": 19.4, "cos": 33.5, "sin": 33.5, "pow": 46.5,
}  # fmt: skip

PRIMITIVES: Mapping[str, Primitive] = {
    **alike([*_UNARY, *_BINARY, *_MORE, *_SCALARS], Primitive(_plain)),
    **{
        name: Primitive(_plain, redo_bytes=nbytes, gpu_bytes=_GPU_BYTES.get(name, 0.0))
        for name, nbytes in _REDO_BYTES.items()
    },
    **alike(["conj", "imag", "real"], Primitive(_first_linear)),
    **alike(["layout_constraint", "reshard"], Primitive(_first_linear, local=True)),
    **alike(["add", "add_any", "sub", "complex"], Primitive(_all_linear)),
    "convert_element_type": Primitive(_convert, Work.NONE, keeps_zero=True),
    "copy": Primitive(_first_linear, Work.NONE, Fusion.INDEXING, moves=True, keeps_zero=True),
    "device_put": Primitive(_each_own, Work.NONE, local=True),
    "div": Primitive(_div, redo_bytes=1.0),
    "mul": Primitive(_mul),
    "name": Primitive(_first_linear, Work.NONE, moves=True, keeps_zero=True),
    "neg": Primitive(_first_linear, keeps_zero=True),
    "optimization_barrier": Primitive(_each_own, Work.NONE),
    "select_n": Primitive(_select),
    "shard_alike": Primitive(_all_linear),
    "sharding_constraint": Primitive(
        _first_linear, Work.NONE, moves=True, keeps_zero=True, local=True
    ),
    "stop_gradient": Primitive(_first_linear, Work.NONE),
    # Counter-based generators hash each item on its own; key words may be scalars.
    "threefry2x32": Primitive(_plain, fusion=Fusion.KERNEL),
    "threefry4x32": Primitive(_plain),
    "tie": Primitive(_tie),
}
