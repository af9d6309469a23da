"""Small programs that reduce, slide, index, factor and draw, by family."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.cases import Example, b, bound, f, i, u

REDUCE = [
    Example("sum", lambda x: x.sum((0, 2)), (f(2, 4, 8),), smoke=True),
    Example("extremes", lambda x: [x.max(1), x.min(0), x.prod(1)], (f(4, 8),), smoke=True),
    Example("int max", lambda x: [x.max(1), x.min(0)], (i(9, 4, 8, low=-9),)),
    Example("logic", lambda x: [jnp.all(x, 1), jnp.any(x, 0)], (b(4, 8),), smoke=True),
    Example("bitwise", lambda x: [lax.reduce_and(x, (1,)), lax.reduce_or(x, (1,))], (i(99, 4, 8),)),
    Example("xor", lambda x: lax.reduce_xor(x, (1,)), (i(99, 4, 8),)),
    Example("bool max", lambda x: [lax.reduce_max(x, (1,)), lax.reduce_min(x, (1,))], (b(4, 8),)),
    Example("positions", lambda x: [jnp.argmax(x, 1), jnp.argmin(x, 0)], (f(4, 8),)),
    Example("variadic", lambda x, y: lax.reduce(
        (x, y), (np.float32(0), np.int32(0)), lambda p, q: (p[0] + q[0], p[1] + q[1]), (1,)),
        (f(4, 8), i(9, 4, 8))),
    Example("running", lambda x: [
        lax.cumsum(x, 1), lax.cumprod(x, 0), lax.cummax(x, 1), lax.cummin(x, 1, reverse=True),
        lax.cumlogsumexp(x, 1)], (u(4, 8),)),
    Example("sort", lambda x: lax.sort(x, dimension=0), (f(4, 8),)),
    Example("sort pairs", lambda x, y: lax.sort((x, y), num_keys=1), (f(4, 8), i(9, 4, 8))),
    Example("top k", lambda x: lax.top_k(x, 2), (f(4, 8),)),
    Example("approximate top k", lambda x: lax.approx_max_k(x, 2), (f(4, 8),)),
]  # fmt: skip


def _conv(
    layout: tuple[str, str, str], *, pad: Any = "SAME", stride: int = 1, **groups: Any
) -> Callable[..., Any]:
    spaces = len(layout[0]) - 2
    return lambda x, k: lax.conv_general_dilated(
        x, k, (stride,) * spaces, pad, dimension_numbers=layout, **groups
    )


def _pool(x: jax.Array) -> list[jax.Array]:
    sizes: dict[str, Any] = {
        "window_dimensions": (1, 2), "window_strides": (1, 2), "padding": "VALID",
    }  # fmt: skip
    general = lax.reduce_window(x, np.float32(1), lambda p, q: p * q + 0, **sizes)
    extremes = [(np.float32(np.inf), lax.min), (np.float32(-np.inf), lax.max)]
    return [
        general,
        lax.reduce_window(x, np.float32(0), lax.add, **sizes),
        *(lax.reduce_window(x, start, op, **sizes) for start, op in extremes),
    ]


def _max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "VALID")


def _select_and_scatter(x: jax.Array, y: jax.Array) -> jax.Array:
    private = importlib.import_module("jax._src.lax.windowed_reductions")
    sizes = [(1, 2), (1, 2), ((0, 0), (0, 0))]
    return private._select_and_scatter(x, lax.ge, *sizes, y, jnp.float32(1), lax.mul)


_NCW, _NWC = ("NCW", "OIW", "NCW"), ("NWC", "WIO", "NWC")
_WINDOW: dict[str, Any] = {
    "window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0)),
}  # fmt: skip
_DILATED = {**_WINDOW, "base_dilation": (1, 1), "window_dilation": (1, 1)}

WINDOW = [
    Example("conv", _conv(_NCW), (f(2, 4, 8), f(4, 4, 3)), smoke=True),
    Example("conv channels last", _conv(_NWC, stride=2), (f(2, 8, 4), f(3, 4, 8))),
    Example("conv one tap", _conv(_NCW), (f(2, 2, 8), f(4, 2, 1))),
    Example("conv two dims", _conv(("NCHW", "OIHW", "NCHW"), pad=((0, 0), (1, 1))),
            (f(2, 2, 8, 3), f(2, 2, 1, 3))),
    Example("depthwise", _conv(_NCW, feature_group_count=4), (f(2, 4, 4), f(8, 1, 3))),
    Example("feature groups", _conv(_NWC, feature_group_count=4), (f(2, 4, 8), f(3, 2, 8))),
    Example("batch groups", _conv(_NCW, batch_group_count=4), (f(8, 2, 4), f(8, 2, 3))),
    Example("conv gradients", jax.grad(lambda x, k: _conv(_NCW, feature_group_count=2)(x, k).sum(),
                                       argnums=(0, 1)), (f(2, 4, 4), f(4, 2, 3))),
    Example("pool", _pool, (f(4, 8),)),
    Example("pool gradient", jax.grad(lambda x: _max_pool(x).sum()), (f(4, 8),)),
    Example("pool whole dims", lambda x: lax.reduce_window(
        x, np.float32(0), lax.add, (1, 1), (1, 1), "VALID"), (f(4, 8),)),
    Example("select and scatter", _select_and_scatter, (f(4, 8), f(4, 4))),
    Example("pick by", bound("select_and_gather_add", select_prim=lax.ge_p, **_DILATED),
            (f(4, 8), u(4, 8))),
]  # fmt: skip


def _gather(
    mode: lax.GatherScatterMode, sizes: tuple[int, ...], fill: Any = None, **numbers: Any
) -> Callable[..., Any]:
    dims = lax.GatherDimensionNumbers(**numbers)
    return lambda x, k: lax.gather(x, k, dims, sizes, mode=mode, fill_value=fill)


_FILL, _CLIP = lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.CLIP
_ROWS: dict[str, Any] = {"offset_dims": (1,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}
_PAIRS: dict[str, Any] = {
    "offset_dims": (),
    "collapsed_slice_dims": (0, 1),
    "start_index_map": (1, 0),
}
# Beyond both ends of 8 rows.
_WILD = np.array([[0], [7], [8], [-1], [3], [-9], [100], [5]], np.int32)
_NARROW = np.array([[0], [127], [-1], [-128], [-100], [64], [99], [5]], np.int8)
_UNSIGNED = np.array([[0], [7], [2**32 - 1], [2**31], [2**31 + 3], [8], [3], [5]], np.uint32)

GATHER = [
    Example("embed", lambda x, k: x[k], (f(8, 4), i(8, 4)), smoke=True),
    Example("embed gradient", jax.grad(lambda x, k: (x[k] ** 2).sum()), (f(8, 4), i(8, 4))),
    Example("rows fill", _gather(_FILL, (1, 4), **_ROWS), (f(8, 4), _WILD), smoke=True),
    Example("rows fill five", _gather(_FILL, (1, 4), 5.0, **_ROWS), (f(8, 4), _WILD)),
    Example("rows clip", _gather(_CLIP, (1, 4), **_ROWS), (f(8, 4), _WILD)),
    Example("rows promised", _gather(lax.GatherScatterMode.PROMISE_IN_BOUNDS, (1, 4), **_ROWS),
            (f(8, 4), _WILD)),
    Example("rows int", _gather(_FILL, (1, 4), **_ROWS), (i(99, 8, 4), _WILD)),
    Example("rows bool", _gather(_FILL, (1, 4), **_ROWS), (b(8, 4), _WILD)),
    Example("rows narrow", _gather(_FILL, (1, 4), **_ROWS), (f(256, 4), _NARROW)),
    Example("rows narrow clip", _gather(_CLIP, (1, 4), **_ROWS), (f(256, 4), _NARROW)),
    Example("rows unsigned", _gather(_FILL, (1, 4), **_ROWS), (f(8, 4), _UNSIGNED)),
    Example("rows unsigned clip", _gather(_CLIP, (1, 4), **_ROWS), (f(8, 4), _UNSIGNED)),
    Example("points", _gather(_FILL, (1, 1), **_PAIRS), (f(8, 4), i(10, 4, 2, low=-2))),
    Example("kept dims", _gather(_FILL, (1, 2), offset_dims=(1, 2), collapsed_slice_dims=(),
                                 start_index_map=(0, 1)), (f(8, 4), i(9, 4, 2, low=-1))),
    Example("offsets first", _gather(_CLIP, (1, 4), **{**_ROWS, "offset_dims": (0,)}),
            (f(8, 4), i(8, 4, 2, 1))),
    Example("along", lambda x, k: jnp.take_along_axis(x, k, 1), (f(4, 8), i(9, 4, 4))),
    Example("along gradient", jax.grad(lambda x, k: (jnp.take_along_axis(x, k, 1) ** 2).sum()),
            (f(4, 8), i(9, 4, 4))),
    Example("key rows", lambda k, n: jax.random.bits(jax.random.wrap_key_data(k)[n][0], (8,)),
            (jax.random.key_data(jax.random.split(jax.random.key(0), 8)), i(8, 4))),
    Example("dynamic slice", lambda x, k: lax.dynamic_slice(x, (k, k), (8, 3)), (f(8, 4), i(9)),
            smoke=True),
]  # fmt: skip


def _scatter(write: Any, mode: lax.GatherScatterMode = _FILL, **numbers: Any) -> Callable[..., Any]:
    chosen = numbers or {
        "update_window_dims": (1,), "inserted_window_dims": (0,),
        "scatter_dims_to_operand_dims": (0,),
    }  # fmt: skip
    dims = lax.ScatterDimensionNumbers(**chosen)
    return lambda x, k, y: write(x, k, y, dims, mode=mode)


_KEPT: dict[str, Any] = {
    "update_window_dims": (1, 2), "inserted_window_dims": (),
    "scatter_dims_to_operand_dims": (0, 1),
}  # fmt: skip
_POINTS: dict[str, Any] = {
    "update_window_dims": (), "inserted_window_dims": (0, 1),
    "scatter_dims_to_operand_dims": (1, 0),
}  # fmt: skip
_WRITES = [
    lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max,
    lax.scatter,
]  # fmt: skip

SCATTER = [
    *(Example(f"{w.__name__} wild", _scatter(w), (f(8, 4), _WILD, f(8, 4)), smoke=w is _WRITES[0])
      for w in _WRITES),
    Example("add clipped", _scatter(lax.scatter_add, _CLIP), (f(8, 4), _WILD, f(8, 4))),
    Example("add narrow", _scatter(lax.scatter_add), (f(256, 4), _NARROW, f(8, 4))),
    Example("add narrow clipped", _scatter(lax.scatter_add, _CLIP), (f(256, 4), _NARROW, f(8, 4))),
    Example("add unsigned", _scatter(lax.scatter_add), (f(8, 4), _UNSIGNED, f(8, 4))),
    Example("set clipped", _scatter(lax.scatter, _CLIP), (f(8, 4), _UNSIGNED, f(8, 4))),
    Example("add ints", _scatter(lax.scatter_add), (i(9, 8, 4), _WILD, i(9, 8, 4))),
    Example("max bool", lambda x, k, y: x.at[k].max(y), (b(8, 4), i(8, 4), b(4, 4))),
    Example("add kept dims", _scatter(lax.scatter_add, **_KEPT),
            (f(8, 4), i(9, 4, 2, low=-1), f(4, 1, 2))),
    Example("add points", _scatter(lax.scatter_add, **_POINTS),
            (f(8, 4), i(10, 4, 2, low=-2), f(4))),
    Example("one row", lambda x, k, y: x.at[k].set(y), (f(8, 4), i(8), f(4))),
    Example("update slice", lambda x, y, k: lax.dynamic_update_slice(x, y, (k, k)),
            (f(8, 16), f(3, 7), np.int32(5)), smoke=True),
    Example("update slice end", lambda x, y, k: lax.dynamic_update_slice(x, y, (np.int32(0), k)),
            (f(4, 16), f(4, 1), np.int32(99))),
    Example("update slice start", lambda x, y, k: lax.dynamic_update_slice(x, y, (np.int32(3), k)),
            (f(4, 16), f(4, 5), np.int32(-7))),
    Example("update slice narrow", lambda x, y, k: lax.dynamic_update_slice(x, y, (k, k)),
            (f(4, 256), f(3, 5), np.uint8(250))),
]  # fmt: skip


def _definite(*batch: int, n: int = 3) -> np.ndarray:
    """Symmetric positive definite matrices."""
    x = f(*batch, n, n)
    return x @ np.swapaxes(x, -1, -2) + 4 * np.eye(n, dtype=np.float32)


def _factored(x: jax.Array) -> list[Any]:
    return [
        lax.linalg.cholesky(x), *lax.linalg.lu(x), *lax.linalg.qr(x), *lax.linalg.eigh(x),
        *lax.linalg.svd(x), *lax.linalg.tridiagonal(x), *lax.linalg.eig(x), *lax.linalg.schur(x),
        *lax.linalg.hessenberg(x),
    ]  # fmt: skip


def _reflected(x: jax.Array) -> list[Any]:
    a, taus = bound("geqrf")(x)
    return [
        lax.linalg.householder_product(a, taus), lax.linalg.symmetric_product(x, x),
        bound("ormqr", left=True, transpose=False)(a, taus, x),
        *bound("geqp3", use_magma=None)(x, jnp.zeros(x.shape[:-1], jnp.int32)),
    ]  # fmt: skip


def _solve(*, left: bool, transposed: bool) -> Callable[..., Any]:
    return lambda a, b: lax.linalg.triangular_solve(
        a, b, left_side=left, lower=True, transpose_a=transposed
    )


def _transformed(x: jax.Array) -> list[jax.Array]:
    once = jnp.fft.rfft(x)
    return [once, jnp.fft.irfft(once), jnp.fft.fft2(x)]


LINALG = [
    Example("factorizations", _factored, (_definite(8),)),
    Example("reflections", _reflected, (_definite(8),)),
    Example("cholesky", bound("cholesky"), (_definite(2, 4),), smoke=True),
    Example("cholesky update", lax.linalg.cholesky_update, (_definite(), f(3))),
    Example("pivots", lambda x: lax.linalg.lu_pivots_to_permutation(x, 4), (i(3, 8, 3),)),
    *(Example(f"solve {left} {turned}", _solve(left=left, transposed=turned),
              (_definite(2), f(2, 3, 4) if left else f(2, 4, 3)))
      for left in (True, False) for turned in (True, False)),
    Example("tridiagonal solve", lax.linalg.tridiagonal_solve,
            (u(8, 4), u(8, 4) + 4, u(8, 4), f(8, 4, 2))),
    Example("fourier", _transformed, (f(2, 4, 8),)),
]  # fmt: skip

_KEY = jax.random.key_data(jax.random.key(0))


def _keys(data: jax.Array) -> list[Any]:
    key = jax.random.wrap_key_data(data)
    pair = jax.random.split(key, 8)
    more = [jax.random.fold_in(key, 3), jax.random.clone(key), pair[2], jax.random.key(data[0])]
    return [jax.random.key_data(k) for k in more]


def _hashed(x: jax.Array) -> list[Any]:
    pairs = [bound("threefry2x32")(x, x + 1, x, x)]
    fours = [bound("threefry4x32")(*[x] * 8)]
    return [*pairs, *fours, bound("threefry2x32")(x[0], x[1], x, x)]


RANDOM = [
    Example("bits", lambda k: jax.random.bits(jax.random.wrap_key_data(k), (4, 8)), (_KEY,),
            smoke=True),
    Example("bits bytes", lambda k: jax.random.bits(jax.random.wrap_key_data(k), (8,), "uint8"),
            (_KEY,)),
    Example("normal", lambda k: jax.random.normal(jax.random.wrap_key_data(k), (8,)), (_KEY,)),
    Example("keys", _keys, (_KEY,)),
    Example("gamma", lambda k: jax.random.gamma(jax.random.wrap_key_data(k), jnp.ones(8)), (_KEY,)),
    Example("hashes", _hashed, (i(99, 8).astype(np.uint32),)),
    Example("bit generator", lambda s: lax.rng_bit_generator(s, (4, 8)),
            (np.arange(4, dtype=np.uint32),)),
    Example("uniform", lambda x: lax.rng_uniform(x, x + 1, (4, 8)), (np.float32(0),)),
]  # fmt: skip
