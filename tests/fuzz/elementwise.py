"""Op kinds that work item by item: floats, whole numbers, truth values, complex numbers, casts."""

from __future__ import annotations

from tests.fuzz.draw import Draw
from tests.fuzz.writing import Unfit, Value, Writer, op

# What each does to numbers of moderate size gives numbers of moderate size, away from its poles.
_FLOAT = {
    "neg": "-{x}",
    "abs": "jnp.abs({x})",
    "sign": "jnp.sign({x} - 0.1234)",
    "floor": "jnp.floor({x} * 1.37)",
    "ceil": "jnp.ceil({x} * 1.37)",
    "round": "jnp.round({x} * 1.71)",
    "trunc": "jnp.trunc({x} * 1.71)",
    "exp": "jnp.exp(jnp.minimum({x}, 1.5) * 0.5)",
    "exp2": "jnp.exp2(jnp.minimum({x}, 2.0) * 0.5)",
    "expm1": "jnp.expm1(jnp.minimum({x}, 1.5) * 0.5)",
    "log": "jnp.log(jnp.abs({x}) + 0.5)",
    "log1p": "jnp.log1p(jnp.abs({x}))",
    "log2": "jnp.log2(jnp.abs({x}) + 0.7)",
    "log10": "jnp.log10(jnp.abs({x}) + 0.7)",
    "sqrt": "jnp.sqrt(jnp.abs({x}) + 0.1)",
    "rsqrt": "lax.rsqrt({x} * {x} + 0.5)",
    "cbrt": "jnp.cbrt({x} * {x} + 0.2)",
    "square": "jnp.square(jnp.tanh({x}))",
    "reciprocal": "jnp.reciprocal(1.5 + jnp.tanh({x}))",
    "sin": "jnp.sin({x})",
    "cos": "jnp.cos({x} + 0.3)",
    "tan": "jnp.tan(0.5 * jnp.tanh({x}))",
    "sinh": "jnp.sinh(jnp.tanh({x}))",
    "cosh": "jnp.cosh(jnp.tanh({x}))",
    "tanh": "jnp.tanh({x})",
    "arcsin": "jnp.arcsin(0.8 * jnp.tanh({x}))",
    "arccos": "jnp.arccos(0.8 * jnp.tanh({x}))",
    "arctan": "jnp.arctan({x})",
    "arcsinh": "jnp.arcsinh({x})",
    "arccosh": "jnp.arccosh(1.5 + {x} * {x})",
    "arctanh": "jnp.arctanh(0.7 * jnp.tanh({x}))",
    "erf": "lax.erf({x})",
    "erfc": "lax.erfc({x})",
    "erf_inv": "lax.erf_inv(0.8 * jnp.tanh({x}))",
    "lgamma": "lax.lgamma(1.5 + jnp.abs({x}))",
    "digamma": "lax.digamma(1.5 + jnp.abs({x}))",
    "i0e": "jax.scipy.special.i0e({x})",
    "i1e": "jax.scipy.special.i1e({x})",
    "sigmoid": "jax.nn.sigmoid({x})",
    "relu": "jax.nn.relu({x})",
    "relu6": "jax.nn.relu6(3 * {x})",
    "gelu": "jax.nn.gelu({x})",
    "gelu_exact": "jax.nn.gelu({x}, approximate=False)",
    "silu": "jax.nn.silu({x})",
    "elu": "jax.nn.elu({x})",
    "selu": "jax.nn.selu({x})",
    "celu": "jax.nn.celu({x})",
    "softplus": "jax.nn.softplus({x})",
    "softsign": "jax.nn.soft_sign({x})",
    "leaky_relu": "jax.nn.leaky_relu({x})",
    "hard_tanh": "jax.nn.hard_tanh({x})",
    "hard_sigmoid": "jax.nn.hard_sigmoid({x})",
    "hard_swish": "jax.nn.hard_swish({x})",
    "log_sigmoid": "jax.nn.log_sigmoid({x})",
    "mish": "jax.nn.mish({x})",
    "squareplus": "jax.nn.squareplus({x})",
    "sinc": "jnp.sinc({x} + 0.05)",
    "logit": "jax.scipy.special.logit(0.5 + 0.4 * jnp.tanh({x}))",
    "xlogy": "jax.scipy.special.xlogy(0.3, 1.2 + jnp.tanh({x}))",
    "entr": "jax.scipy.special.entr(1.2 + jnp.tanh({x}))",
    "ndtr": "jax.scipy.special.ndtr({x})",
    "norm_logpdf": "jax.scipy.stats.norm.logpdf(0.5 * {x})",
    "is_finite": "jnp.isfinite({x})",
    "isnan": "jnp.isnan({x})",
    "nan_to_num": "jnp.nan_to_num(jnp.where({x} > 0.513, jnp.nan, {x}))",
    "integer_pow": "jnp.tanh({x}) ** 3",
    "clip": "jnp.clip({x}, -0.9, 1.1)",
    "clamp": "lax.clamp(-0.8, {x}, 1.2)",
    "stop_gradient": "lax.stop_gradient({x}) * 0.5 + {x} * 0.5",
    "deg2rad": "jnp.deg2rad(40 * {x})",
    "modf": "jnp.modf(1.3 * {x})[0]",
    "frexp": "jnp.frexp(lax.stop_gradient({x}) + 0.01)[0]",
    "reduce_precision": "lax.reduce_precision({x}, 8, 16)",
    "where_self": "jnp.where({x} > 0.217, {x}, 0.1 * {x})",
    "piecewise": (
        "jnp.piecewise({x}, [{x} < -0.531, {x} > 0.631], [lambda x: -x, jnp.sin, lambda x: "
        "0.5 * x])"
    ),
    "select_list": "jnp.select([{x} < -0.61, {x} < 0.47], [jnp.sin({x}), 0.3 * {x}], {x})",
    "interp": "jnp.interp({x}, jnp.array([-1., 0., 2.]), jnp.array([0.3, -0.4, 1.]))",
    "polyval": "jnp.polyval(jnp.array([0.1, -0.3, 0.2]), jnp.tanh({x}))",
    "polygamma": "jax.scipy.special.polygamma(1, 1.5 + jnp.abs({x}))",
    "custom_gradient_straight": "{x} + lax.stop_gradient(jnp.round(1.71 * {x}) - {x})",
    "optimization_barrier": "lax.optimization_barrier({x})",
    "ldexp": "jnp.ldexp({x}, jnp.full({x}.shape, -1, jnp.int32))",
    "zeta": "jax.scipy.special.zeta(2.5 + jnp.abs(lax.stop_gradient({x})), 1.5)",
    "igamma": "lax.igamma(1.5, jnp.abs(lax.stop_gradient({x})) + 0.2)",
    "betainc": "lax.betainc(1.5, 2.5, 0.5 + 0.4 * jnp.tanh(lax.stop_gradient({x})))",
}
_FLOAT_PAIR = {
    "add": "{x} + {y}",
    "sub": "{x} - {y}",
    "mul": "{x} * jnp.tanh({y})",
    "div": "{x} / (1.5 + jnp.tanh({y}))",
    "max": "jnp.maximum({x}, {y})",
    "min": "jnp.minimum({x}, {y})",
    "pow": "jnp.power(jnp.abs({x}) + 0.5, jnp.tanh({y}))",
    "atan2": "jnp.arctan2({x}, 1.2 + jnp.tanh({y}))",
    "rem": "lax.rem({x}, jnp.broadcast_to(1.7 + jnp.tanh({y}), {x}.shape).astype({x}.dtype))",
    "mod": "jnp.mod({x}, 1.7 + jnp.tanh({y}))",
    "floor_divide": "jnp.floor_divide({x} * 2.3, 1.7 + jnp.tanh({y}))",
    "fmod": "jnp.fmod({x} * 2, 1.7 + jnp.tanh({y}))",
    "hypot": "jnp.hypot({x}, {y} + 1.1)",
    "logaddexp": "jnp.logaddexp({x}, {y})",
    "logaddexp2": "jnp.logaddexp2({x}, {y})",
    "copysign": "jnp.copysign({x}, {y} + 0.011)",
    "heaviside": "jnp.heaviside({x} - 0.117, {y}) + {x}",
    "squared_difference": "jnp.square(jnp.tanh({x}) - jnp.tanh({y}))",
    "where": "jnp.where({y} > 0.117, {x}, {y})",
    "lerp": "{x} + jax.nn.sigmoid({y}) * ({y} - {x})",
    "glu": "{x} * jax.nn.sigmoid({y})",
    "eq": "({x} * 3).astype(jnp.int32) == jnp.int32({y} * 3)",
    "ne": "({x} * 3).astype(jnp.int32) != jnp.int32({y} * 3)",
    "lt": "{x} < {y} + 0.01",
    "le": "{x} <= {y} - 0.02",
    "gt": "{x} > {y} + 0.03",
    "ge": "{x} >= {y} - 0.04",
    "allclose": "jnp.isclose({x}, {y}, atol=0.3)",
    "complex": (
        "lax.complex(*(t.astype(jnp.float32) for t in jnp.broadcast_arrays({x}, jnp.sin({y}))))"
    ),
    "huber": "optax.losses.huber_loss({x}, {y} * jnp.ones_like({x}))",
    "sigmoid_cross_entropy": "optax.losses.sigmoid_binary_cross_entropy({x}, jnp.tanh({y}) * "
    "0.5 + 0.5)",
    "logsumexp_pair": "jax.nn.logsumexp(jnp.stack(jnp.broadcast_arrays({x}, {y})), axis=0)",
    "vectorize": "jnp.vectorize(lambda a, b: jnp.sin(a) * b)({x}, {y})",
    "apply_along_custom_jvp": "jax.nn.softplus({x} - {y})",
}
_INT = {
    "bitwise_not": "~{x}",
    "population_count": "lax.population_count({x})",
    "clz": "lax.clz({x})",
    "int_abs": "jnp.abs({x})",
    "int_sign": "jnp.sign({x})",
    "shift_left": "{x} << 1",
    "shift_right": "{x} >> 2",
    "shift_right_logical": "lax.shift_right_logical({x}, jnp.full({x}.shape, 1, {x}.dtype))",
    "int_mul": "{x} * 3",
    "int_add": "{x} + 5",
    "int_floor_divide": "{x} // 3",
    "int_rem": "{x} % 5",
    "int_divmod": "jnp.divmod({x}, 3)[1] + jnp.divmod({x}, 3)[0]",
    "int_square": "jnp.square({x} % 7)",
    "int_gcd": "jnp.gcd({x} % 12, 8)",
    "int_clip": "jnp.clip({x}, 1, 9)",
    "int_is_odd": "({x} & 1) == 1",
    "bitcast_int": "lax.bitcast_convert_type({x}.astype(jnp.int32), jnp.uint32) % 1000",
    "unpack_bits": "jnp.packbits({x} > 2, axis=-1)",
}
_INT_PAIR = {
    "bitwise_and": "{x} & {y}",
    "bitwise_or": "{x} | {y}",
    "bitwise_xor": "{x} ^ {y}",
    "int_max": "jnp.maximum({x}, {y})",
    "int_equal": "{x} == {y}",
    "int_choose": "jnp.choose({y} % 2, [{x}, {x} + 1], mode='clip')",
    "int_select_n": "lax.select_n(({y} % 3).astype(jnp.int32), {x}, {x} + 1, {x} + 2)",
}
_BOOL = {
    "logical_not": "~{x}",
    "bool_to_int": "{x}.astype(jnp.int32) * 3 + 1",
    "bool_to_float": "{x}.astype(jnp.float32) - 0.3",
}
_BOOL_PAIR = {
    "logical_and": "{x} & {y}",
    "logical_or": "{x} | {y}",
    "logical_xor": "jnp.logical_xor({x}, {y})",
}
_COMPLEX = {
    "real": "jnp.real({x})",
    "imag": "jnp.imag({x})",
    "conj": "jnp.conj({x}) * (1 - 0.5j)",
    "complex_abs": "jnp.abs({x} + 1.2)",
    "angle": "jnp.angle({x} * 0.3 + 1.5)",
    "complex_exp": "jnp.exp({x} * 0.3j)",
}
_CASTS = {
    "bfloat16": "{x}.astype(jnp.bfloat16)",
    "float16": "{x}.astype(jnp.float16)",
    "float32": "{x}.astype(jnp.float32)",
    "int32": "jnp.round({x} * 7.3).astype(jnp.int32)",
    "int8": "jnp.clip(jnp.round({x} * 9.1), -90, 90).astype(jnp.int8)",
    "uint8": "jnp.clip(jnp.round({x} * 9.1) + 30, 0, 90).astype(jnp.uint8)",
    "uint32": "jnp.clip(jnp.round({x} * 9.1) + 30, 0, 90).astype(jnp.uint32)",
    "int16": "jnp.clip(jnp.round({x} * 9.1), -90, 90).astype(jnp.int16)",
    "bool": "({x} * 1.9).astype(jnp.int32).astype(bool)",
    "complex64": "{x}.astype(jnp.complex64) * (1 + 0.2j)",
}


def _of(value: Value, kind: str) -> bool:
    if kind == "float":
        return value.is_float
    return value.is_int if kind == "int" else value.dtype == kind


def _single(name: str, text: str, kind: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if not _of(v, kind) or (name == "unpack_bits" and v.rank - 1 not in w.axes(v)):
            raise Unfit
        return w.let(text.format(x=v.name), v.rows)


def partner(w: Writer, v: Value, draw: Draw) -> str:
    """Something of the same dtype that a float or a whole number can be combined with."""
    choices = ["same", "param", "scalar"]
    if [a for a in w.axes(v) if v.shape[a] > 1]:
        choices += ["mean", "roll"]
    choice = draw.one(choices)
    x = v.name
    if choice == "same" or not v.rank:
        return f"jnp.roll({x}, 0)" if v.dtype == "bool" else f"({x} * 2)"
    if choice == "scalar":
        return {"bool": "True", "complex64": "0.5j"}.get(v.dtype, "3" if v.is_int else "0.37")
    if choice == "param":
        keep = v.rank - 1 - draw.below(v.rank)
        last = [v.shape[a] if a != v.rows else 1 for a in range(keep, v.rank)]
        made = w.param(*last, scale=0.5)
        cast = f"({made} * 8).astype({x}.dtype)" if v.is_int else f"{made}.astype({x}.dtype)"
        return f"({made} > 0)" if v.dtype == "bool" else cast
    axis = w.axis(v, draw, 2)
    if choice == "roll":
        return f"jnp.roll({x}, 1, {axis})"
    if v.is_float:
        return f"jnp.mean({x}, {axis}, keepdims=True)"
    return f"jnp.{'any' if v.dtype == 'bool' else 'max'}({x}, {axis}, keepdims=True)"


def _pair(name: str, text: str, kind: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if not _of(v, kind):
            raise Unfit
        made = text.format(x=v.name, y=partner(w, v, draw))
        if name in ("int_choose", "int_select_n"):
            made = text.format(x=v.name, y=v.name)
        return w.let(made, v.rows)


def _cast(name: str, text: str) -> None:
    @op(f"to_{name}")
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if not v.is_float or v.dtype == name:
            raise Unfit
        return w.let(text.format(x=v.name), v.rows)


for _name, _text in _FLOAT.items():
    _single(_name, _text, "float")
for _name, _text in _INT.items():
    _single(_name, _text, "int")
for _name, _text in _BOOL.items():
    _single(_name, _text, "bool")
for _name, _text in _COMPLEX.items():
    _single(_name, _text, "complex64")
for _name, _text in _FLOAT_PAIR.items():
    _pair(_name, _text, "float")
for _name, _text in _INT_PAIR.items():
    _pair(_name, _text, "int")
for _name, _text in _BOOL_PAIR.items():
    _pair(_name, _text, "bool")
for _name, _text in _CASTS.items():
    _cast(_name, _text)
