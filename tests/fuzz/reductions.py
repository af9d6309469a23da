"""Op kinds that combine items along an axis: sums, running sums, statistics, softmaxes, norms."""

from __future__ import annotations

from tests.fuzz.draw import Draw
from tests.fuzz.shapes import left
from tests.fuzz.writing import Unfit, Value, Writer, op

_AWAY = {  # the axis is gone
    "reduce_sum": ("jnp.sum({x}, {a}) / {n} ** 0.5", "float"),
    "reduce_mean": ("jnp.mean({x}, {a})", "float"),
    "reduce_max": ("jnp.max({x}, {a})", "number"),
    "reduce_min": ("jnp.min({x}, {a})", "number"),
    "reduce_prod": ("jnp.prod(1 + 0.1 * jnp.tanh({x}), {a})", "float"),
    "reduce_any": ("jnp.any({x}, {a})", "bool"),
    "reduce_all": ("jnp.all({x}, {a})", "bool"),
    "count_nonzero": ("jnp.count_nonzero({x}, {a})", "bool"),
    "argmax": ("jnp.argmax({x}, {a})", "number"),
    "argmin": ("jnp.argmin({x}, {a})", "number"),
    "var": ("jnp.var({x}, {a})", "float"),
    "std": ("jnp.sqrt(jnp.var({x}, {a}) + 0.1)", "float"),
    "logsumexp": ("jax.nn.logsumexp({x}, {a})", "float"),
    "ptp": ("jnp.ptp({x}, {a})", "float"),
    "median": ("jnp.median({x}, {a})", "float32"),
    "quantile": ("jnp.quantile({x}, 0.3, {a})", "float32"),
    "nansum": ("jnp.nansum(jnp.where({x} > 0.613, jnp.nan, {x}), {a}) / {n}", "float"),
    "nanmean": ("jnp.nanmean(jnp.where({x} > 5.0, jnp.nan, {x}), {a})", "float"),
    "average": ("jnp.average({x}, {a}, weights=jax.nn.sigmoid({x}))", "float"),
    "norm": ("jnp.sqrt(jnp.sum({x} * {x}, {a}) + 0.1) / {n} ** 0.5", "float"),
    "norm_1": ("jnp.linalg.norm({x}, 1, {a}) / {n}", "float32"),
    "int_sum": ("jnp.sum({x}, {a})", "int"),
    "int_prod": ("jnp.prod({x} % 3 + 1, {a})", "int"),
    "reduce_and": ("lax.reduce_and({x}, axes=({a},))", "int"),
    "reduce_or": ("lax.reduce_or({x}, axes=({a},))", "int"),
    "reduce_xor": ("lax.reduce_xor({x}, axes=({a},))", "int"),
    "reduce_custom": (
        "lax.reduce(lax.stop_gradient({x}), jnp.zeros((), {x}.dtype), "
        "lambda a, b: jnp.maximum(a, b) + 0.25 * jnp.minimum(a, b) * 0, ({a},))", "float"
    ),
    "log_mean_exp": ("jnp.log(jnp.mean(jnp.exp(jnp.tanh({x})), {a}))", "float"),
    "trapezoid": ("jnp.trapezoid({x}, axis={a}) / {n}", "float32"),
    "first_true": ("jnp.argmax({x} > 0.317, {a})", "float"),
}  # fmt: skip
_ALONG = {  # the axis stays
    "cumsum": ("jnp.cumsum({x}, {a}) / {n} ** 0.5", "float"),
    "cumprod": ("jnp.cumprod(1 + 0.1 * jnp.tanh({x}), {a})", "float"),
    "cummax": ("lax.cummax({x}, {a})", "float"),
    "cummin": ("lax.cummin({x}, {a})", "float"),
    "cumlogsumexp": ("lax.cumlogsumexp({x}, {a})", "float32"),
    "cumsum_reverse": ("lax.cumsum({x}, {a}, reverse=True) / {n}", "float"),
    "int_cumsum": ("jnp.cumsum({x}, {a})", "int"),
    "cumulative_any": ("jnp.cumsum({x}, {a}) > 1", "bool"),
    "associative_scan": (
        "lax.associative_scan(lambda a, b: a * 0.9 + b * jnp.cos(a * 0), {x}, axis={a})", "float32"
    ),
    "associative_scan_pair": (
        "lax.associative_scan(lambda l, r: (l[0] * r[0], r[1] + r[0] * l[1]), "
        "(jax.nn.sigmoid({x}), {x}), axis={a})[1]", "float32"
    ),
    "softmax": ("jax.nn.softmax({x}, {a})", "float"),
    "log_softmax": ("jax.nn.log_softmax({x}, {a})", "float"),
    "softmax_where": ("jax.nn.softmax({x}, {a}, where={x} < 1.013)", "float32"),
    "standardize": ("jax.nn.standardize({x}, {a}, epsilon=0.1)", "float"),
    "layer_norm": (
        "({x} - jnp.mean({x}, {a}, keepdims=True)) "
        "* lax.rsqrt(jnp.var({x}, {a}, keepdims=True) + 0.1)", "float"
    ),
    "rms_norm": ("{x} * lax.rsqrt(jnp.mean({x} * {x}, {a}, keepdims=True) + 0.1)", "float"),
    "l2_normalize": ("{x} / jnp.sqrt(jnp.sum({x} * {x}, {a}, keepdims=True) + 0.3)", "float"),
    "center_max": ("{x} - lax.stop_gradient(jnp.max({x}, {a}, keepdims=True))", "float"),
    "hardmax": ("jax.nn.one_hot(jnp.argmax({x}, {a}), {n}, axis={a}) * {x}", "float32"),
    "sparsemax_like": ("jnp.maximum({x} - jnp.mean({x}, {a}, keepdims=True), 0)", "float"),
    "window_sum": (
        "lax.reduce_window({x}, 0.0, lax.add, {window}, {ones}, 'SAME') / 3", "float32"
    ),
    "window_max": (
        "lax.reduce_window({x}, -jnp.inf, lax.max, {window}, {strides}, 'SAME')", "float32"
    ),
    "pmean_vmapped": (
        "jax.vmap(lambda r: r - lax.pmean(r, 'i'), axis_name='i', in_axes={a}, out_axes={a})({x})",
        "float32"
    ),
    "ema_scan": (
        "jnp.moveaxis(lax.scan(lambda c, t: ((n := 0.7 * c + 0.3 * t), n), "
        "jnp.zeros_like(jnp.moveaxis({x}, {a}, 0)[0]), jnp.moveaxis({x}, {a}, 0))[1], 0, {a})",
        "float32"
    ),
    "scan_reverse": (
        "jnp.moveaxis(lax.scan(lambda c, t: ((n := jnp.tanh(c + t)), n * c), "
        "jnp.zeros_like(jnp.moveaxis({x}, {a}, 0)[0]), jnp.moveaxis({x}, {a}, 0), "
        "reverse=True, unroll=2)[1], 0, {a})", "float32"
    ),
}  # fmt: skip


def _fits(v: Value, kind: str) -> bool:
    if kind == "number":
        return v.is_float or v.is_int
    if kind == "float":
        return v.is_float
    return v.is_int if kind == "int" else v.dtype == kind


def _away(name: str, text: str, kind: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if not _fits(v, kind):
            raise Unfit
        axis = w.axis(v, draw, 2)
        return w.let(text.format(x=v.name, a=axis, n=v.dim(axis)), left(v, axis))


def _along(name: str, text: str, kind: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if not _fits(v, kind):
            raise Unfit
        axis = w.axis(v, draw, 2)
        if name == "window_max" and axis == v.rows:
            raise Unfit
        made = text.format(
            x=v.name, a=axis, n=v.dim(axis),
            window=tuple(3 if a == axis else 1 for a in range(v.rank)),
            strides=tuple(2 if a == axis else 1 for a in range(v.rank)),
            ones=(1,) * v.rank,
        )  # fmt: skip
        return w.let(made, v.rows)


for _name, (_text, _kind) in _AWAY.items():
    _away(_name, _text, _kind)
for _name, (_text, _kind) in _ALONG.items():
    _along(_name, _text, _kind)


@op("reduce_all_axes")
def _reduce_all_axes(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_float or v.rank < 2:
        raise Unfit
    axes = tuple(w.axes(v))
    how = draw.one(["mean", "max", "min"])
    rows = None if v.rows is None or v.rows in axes else 0
    return w.let(f"jnp.{how}({v.name}, {axes})", rows)


@op("group_norm")
def _group_norm(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_float or v.rank < 2 or v.shape[-1] % 2 or v.rows == v.rank - 1:
        raise Unfit
    dims = "".join(f"{v.dim(a)}, " for a in range(v.rank - 1))
    grouped = w.let(f"{v.name}.reshape({dims}2, -1)", v.rows)
    x = grouped.name
    made = w.let(f"({x} - jnp.mean({x}, -1, keepdims=True)) "
                 f"* lax.rsqrt(jnp.var({x}, -1, keepdims=True) + 0.1)", v.rows)  # fmt: skip
    return w.let(f"{made.name}.reshape({dims}-1) * (1 + {w.param(v.shape[-1])}.astype({x}.dtype))",
                 v.rows)  # fmt: skip


@op("batch_norm")
def _batch_norm(w: Writer, v: Value, draw: Draw) -> Value:
    if not w.mixes or v.rows is None or v.dtype != "float32" or v.rows == v.rank - 1:
        raise Unfit
    axes, x = tuple(range(v.rank - 1)), v.name
    scale, shift = w.param(v.shape[-1], scale=0.1, mean=1.0), w.param(v.shape[-1])
    return w.let(
        f"({x} - jnp.mean({x}, {axes})) * lax.rsqrt(jnp.var({x}, {axes}) + 0.1) * {scale} + "
        f"{shift}",
        v.rows,
    )


@op("scaled_norm")
def _scaled_norm(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank < 2 or v.rows == v.rank - 1:
        raise Unfit
    x = v.name
    scale, shift = w.param(v.shape[-1], scale=0.1, mean=1.0), w.param(v.shape[-1], scale=0.1)
    return w.let(
        f"({x} - jnp.mean({x}, -1, keepdims=True)) / jnp.sqrt(jnp.var({x}, -1, "
        f"keepdims=True) + 0.1)"
        f" * {scale} + {shift}",
        v.rows,
    )
