"""Small programs that between them use every primitive with a rule, by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.rules.primitives import primitive


@dataclass(frozen=True)
class Example:
    """A program to check, and whether it belongs to the quick sample."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    smoke: bool = False


def f(*shape: int) -> np.ndarray:
    """Small whole numbers as f32, so that sums are exact in any order."""
    return np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)


def u(*shape: int) -> np.ndarray:
    """Numbers strictly between 0 and 1."""
    return np.random.default_rng(1).uniform(0.1, 0.9, shape).astype(np.float32)


def i(limit: int, *shape: int, low: int = 0) -> np.ndarray:
    """Indices from `low` up to `limit`."""
    return np.random.default_rng(2).integers(low, limit, shape).astype(np.int32)


def b(*shape: int) -> np.ndarray:
    """Booleans."""
    return np.random.default_rng(3).integers(0, 2, shape).astype(bool)


def bound(name: str, **params: Any) -> Callable[..., Any]:
    """A primitive as a function, for those that no public function reaches."""
    return lambda *args: primitive(name).bind(*args, **params)


_UNARY: list[Callable[..., Any]] = [
    lax.abs, lax.acos, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.bessel_i0e, lax.bessel_i1e,
    lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.digamma, lax.erf, lax.erf_inv, lax.erfc, lax.exp,
    lax.exp2, lax.expm1, lax.floor, lax.is_finite, lax.lgamma, lax.log, lax.log1p, lax.logistic,
    lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh, lax.sqrt, lax.square, lax.tan,
    lax.tanh, lax.stop_gradient,
]  # fmt: skip
_BINARY: list[Callable[..., Any]] = [
    lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.pow, lax.atan2,
    lax.nextafter, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, bound("eq_to"),
    bound("le_to"), bound("lt_to"), bound("add_any"),
]  # fmt: skip


def _unary(x: jax.Array) -> list[jax.Array]:
    more = [lax.acosh(x + 1), lax.integer_pow(x, 3), lax.reduce_precision(x, 5, 3), jnp.copy(x)]
    return [fn(x) for fn in _UNARY] + more + [checkpoint_name(x, "kept")]


def _binary(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [fn(x, y) for fn in _BINARY]


def _special(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    slow = [lax.igamma, lax.igammac, lax.igamma_grad_a, lax.zeta]
    return [fn(x, y) for fn in slow] + [lax.polygamma(lax.round(x), y), lax.betainc(x, y, x)]


def _integers(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    shifts = [lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical]
    logic = [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, *shifts]
    return [fn(x, y) for fn in logic] + [~x, lax.clz(x), lax.population_count(x), x // y]


def _complex(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    z = lax.complex(x, y)
    return [lax.real(z), lax.imag(z), lax.conj(z), z * 2, lax.complex(x, x) / z]


def _placed(x: jax.Array) -> list[jax.Array]:
    mesh = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [
        jax.device_put(x, mesh),
        *primitive("shard_alike").bind(x, x),
        *lax.optimization_barrier((x, x[0])),
        primitive("tie").bind(x, x[0]),
    ]


POINTWISE = [
    Example("unary", _unary, (u(8),)),
    Example("binary", _binary, (u(8), u(8))),
    Example("special", _special, (u(2), u(2))),  # slow to compile, so sharded in one way only
    Example("integers", _integers, (i(9, 8, low=1), i(5, 8, low=1))),
    Example("complex", _complex, (f(8), f(8))),
    Example("add 2d", lambda x, y: x + y * 2, (f(4, 8), f(4, 8)), smoke=True),
    Example("ones broadcast", lambda x, y: primitive("add").bind(x, y), (f(4, 8), f(1, 8))),
    Example("select scalar", lambda p, x: lax.select_n(p, x, -x), (np.True_, f(4, 8))),
    Example("select", lambda p, x: lax.select_n(p, x, -x, x + 1), (i(3, 4, 8), f(4, 8))),
    Example("clamp scalar", lambda x: lax.clamp(np.float32(-1), x, np.float32(2)), (f(4, 8),)),
    Example("clamp", lambda a, x: lax.clamp(a, x, a + 2), (f(4, 8), f(4, 8))),
    Example("widen", lambda x: x.astype(jnp.float32), (f(4, 8).astype(jnp.bfloat16),)),
    Example("narrow", lambda x: x.astype(jnp.bfloat16).astype(jnp.int32), (f(4, 8),)),
    Example("placed", _placed, (f(4, 8),)),
    Example("platform", bound("platform_index", platforms=(("tpu",), None))),
]

SHAPE = [
    Example("merge", lambda x: x.reshape(8, 3), (f(2, 4, 3),), smoke=True),
    Example("split dim", lambda x: x.reshape(4, 2, 3), (f(8, 3),)),
    Example("regroup", lambda x: x.reshape(2, 16), (f(8, 4),)),
    Example("coprime", lambda x: x.reshape(4, 6), (f(6, 4),)),
    Example("ones", lambda x: x.reshape(1, 8, 1, 4), (f(8, 1, 4),)),
    Example("to scalar", lambda x: x.reshape(()), (f(1, 1),)),
    Example("turned merge", lambda x: lax.reshape(x, (8, 12), (2, 1, 0)), (f(4, 3, 8),)),
    Example("turned split", lambda x: lax.reshape(x, (2, 4, 6), (1, 0)), (f(6, 8),)),
    Example("empty reshape", lambda x: x.reshape(8, 0), (f(0, 4),)),
    Example("transpose", lambda x: x.transpose(2, 0, 1), (f(4, 3, 8),)),
    Example("broadcast new", lambda x: lax.broadcast_in_dim(x, (8, 4, 3), (1,)), (f(4),)),
    Example("broadcast one", lambda x: lax.broadcast_in_dim(x, (8, 4), (0, 1)), (f(8, 1),)),
    Example("full", lambda: jnp.full((8, 4), 3.0)),
    Example("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 4), 0), smoke=True),
    Example("iota bf16", lambda: lax.broadcasted_iota(jnp.bfloat16, (1024, 4), 0)),
    Example("iota i8", lambda: lax.broadcasted_iota(jnp.int8, (4, 512), 1)),
    Example("iota pair", bound("iota_2x32_shape", shape=(4, 8))),
    Example("empty", lambda: lax.empty((4, 8), jnp.float32)),
    Example("squeeze", lambda x: lax.squeeze(x, (1,)), (f(4, 1, 8),)),
    Example("rev", lambda x: lax.rev(x, (1,)), (f(4, 8),)),
    Example("concatenate", lambda x, y: lax.concatenate([x, y, x], 1), (f(4, 8), f(4, 3))),
    Example("split", lambda x: lax.split(x, (2, 6), 1), (f(4, 8),)),
    Example("stack", lambda x, y: jnp.stack([x, y], 1), (f(4, 8), f(4, 8))),
    Example("unstack", lambda x: jnp.unstack(x, axis=1), (f(4, 2, 8),)),
    Example("tile", lambda x: jnp.tile(x, (4, 1, 2)), (f(2, 8, 3),)),
    Example("pad", lambda x: lax.pad(x, np.float32(2), ((0, 0, 0), (1, 2, 1))), (f(8, 4),)),
    Example("pad zero", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 2, 0))), (f(8, 4),)),
    Example("slice", lambda x: lax.slice(x, (0, 1, 0), (8, 5, 4)), (f(8, 6, 4),), smoke=True),
    Example("slice strided", lambda x: lax.slice(x, (0, 0), (8, 6), (1, 2)), (f(8, 6),)),
    Example("bitcast", lambda x: lax.bitcast_convert_type(x, jnp.int32), (f(4, 8),)),
    Example("bitcast narrow", lambda x: lax.bitcast_convert_type(x, jnp.uint16), (f(4, 8),)),
    Example("bitcast wide", lambda x: lax.bitcast_convert_type(x, jnp.int32),
            (i(99, 4, 8, 2).astype(np.uint16),)),
]  # fmt: skip


def _dot(
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Callable[..., Any]:
    return lambda x, y: lax.dot_general(x, y, (contract, batch))


def _ragged(
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    batch: tuple[tuple[int, ...], tuple[int, ...]],
    ragged: int,
    groups: tuple[int, ...],
) -> Callable[..., Any]:
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), (ragged,), groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


_GROUPS = np.array([1, 3, 4], np.int32)

CONTRACT = [
    Example("matmul", lambda x, y: x @ y, (f(4, 8), f(8, 4)), smoke=True),
    Example("batched", _dot(((2,), (1,)), ((0,), (0,))), (f(2, 3, 4), f(2, 4, 8))),
    Example("two contracted", _dot(((0, 2), (1, 0))), (f(4, 3, 8), f(8, 4, 2))),
    Example("batch last", _dot(((0,), (1,)), ((2,), (0,))), (f(4, 3, 8), f(8, 4, 2))),
    Example("outer", _dot(((), ())), (f(4), f(8))),
    Example("inner", _dot(((0,), (0,))), (f(8), f(8))),
    Example("int matmul", lambda x, y: x @ y, (i(9, 4, 8), i(9, 8, 4))),
    Example("bool matmul", _dot(((1,), (0,))), (b(4, 8), b(8, 4))),
    Example("wide sums", lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
            (f(4, 8).astype(jnp.bfloat16), f(8, 4).astype(jnp.bfloat16))),
    Example("ragged rows", _ragged(((1,), (1,)), ((), ()), 0, (0,)),
            (f(8, 4), f(3, 4, 8), _GROUPS)),
    Example("ragged contracted", _ragged(((0,), (0,)), ((), ()), 0, ()),
            (f(8, 4), f(8, 4), _GROUPS)),
    Example("ragged batched", _ragged(((2,), (2,)), ((0,), (0,)), 1, (1,)),
            (f(2, 8, 4), f(2, 3, 4, 8), np.stack([_GROUPS, _GROUPS[::-1]]))),
]  # fmt: skip
