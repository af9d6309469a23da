"""Op kinds of numerical work: linear algebra, Fourier transforms, random draws, bits."""

from __future__ import annotations

from tests.fuzz.draw import Draw
from tests.fuzz.shapes import left
from tests.fuzz.writing import Unfit, Value, Writer, op


def _square(w: Writer, v: Value, most: int = 12) -> Value:
    """A symmetric matrix with eigenvalues well above nought from the value's last two axes."""
    if v.dtype != "float32" or v.rank < 2 or v.rows in (v.rank - 1, v.rank - 2):
        raise Unfit
    if min(v.shape[-2:]) < 2 or v.shape[-1] > most:
        raise Unfit
    x, n = v.name, v.shape[-1]
    gram = w.let(f"jnp.swapaxes({x}, -1, -2) @ {x} / {v.shape[-2]}", v.rows)
    return w.let(
        f"jnp.tanh({gram.name}) * 0.3 + jnp.diag(jnp.arange({n}) * 0.5 + {1.0 + 0.3 * n})", v.rows
    )


_OF_SQUARE = {
    "cholesky": ("jnp.linalg.cholesky({m})", 0),
    "cholesky_upper": ("jax.scipy.linalg.cholesky({m})", 0),
    "eigvalsh": ("jnp.log(jnp.linalg.eigvalsh({m}))", 1),
    "eigh_projector": ("jnp.linalg.eigh(lax.stop_gradient({m}))[0] * 0.2", 1),
    "slogdet": ("jnp.linalg.slogdet({m})[1]", 2),
    "det": ("jnp.tanh(jnp.linalg.det({m} / {n}))", 2),
    "inv": ("jnp.linalg.inv({m})", 0),
    "lu_factor": ("jax.scipy.linalg.lu_factor({m})[0] * 0.3", 0),
    "svd_values": ("jnp.linalg.svd(lax.stop_gradient({m}), compute_uv=False) * 0.2", 1),
    "matrix_power": ("jnp.linalg.matrix_power({m} / {n}, 3)", 0),
    "expm": ("jax.scipy.linalg.expm({m} * 0.1)", 0),
    "trace": ("jnp.trace({m}, axis1=-2, axis2=-1) / {n}", 2),
    "qr": ("jnp.abs(jnp.linalg.qr({m})[0])", 0),
    "qr_r": ("jnp.abs(jnp.linalg.qr({m}, mode='r'))", 0),
    "pinv": ("jnp.linalg.pinv(lax.stop_gradient({m}))", 0),
    "sqrtm_newton": ("jnp.linalg.solve({m} + jnp.eye({n}), {m})", 0),
}


def _of_square(name: str, text: str, fewer: int) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        made = _square(w, v)
        return w.let(text.format(m=made.name, n=v.shape[-1]), v.rows)


for _name, (_text, _fewer) in _OF_SQUARE.items():
    _of_square(_name, _text, _fewer)


@op("solve")
def _solve(w: Writer, v: Value, draw: Draw) -> Value:
    m = _square(w, v)
    return w.let(f"jnp.linalg.solve({m.name}, jnp.swapaxes({v.name}, -1, -2))", v.rows)


@op("cho_solve")
def _cho_solve(w: Writer, v: Value, draw: Draw) -> Value:
    m = _square(w, v)
    if m.rank > 2:
        raise Unfit
    return w.let(
        f"jax.scipy.linalg.cho_solve((jnp.linalg.cholesky({m.name}), True), {v.name}.T)", v.rows
    )


@op("triangular_solve")
def _triangular(w: Writer, v: Value, draw: Draw) -> Value:
    m = _square(w, v)
    lower = draw.chance(0.5)
    return w.let(
        f"lax.linalg.triangular_solve({m.name}, jnp.swapaxes({v.name}, -1, -2), left_side=True, "
        f"lower={lower}, transpose_a={draw.chance(0.5)})",
        v.rows,
    )


@op("shared_solve")
def _shared_solve(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank != 2 or v.rows not in (0, None) or v.shape[1] > 16:
        raise Unfit
    n = v.shape[1]
    table = w.param(n, n, scale=0.1)
    return w.let(f"jnp.linalg.solve(2 * jnp.eye({n}) + {table}, {v.name}.T).T", v.rows)


@op("triangular_inverse_param")
def _triangular_param(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank != 2 or v.rows not in (0, None):
        raise Unfit
    n = v.shape[1]
    table = w.param(n, n, scale=0.1)
    return w.let(
        f"jax.scipy.linalg.solve_triangular(2 * jnp.eye({n}) + jnp.tril({table}), {v.name}.T, "
        f"lower=True).T",
        v.rows,
    )


@op("conjugate_gradient")
def _cg(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank != 1 or v.rows is not None:
        raise Unfit
    return w.let(
        f"jax.scipy.sparse.linalg.cg(lambda t: 3 * t + 0.5 * jnp.roll(t, 1) + 0.5 * "
        f"jnp.roll(t, -1), "
        f"{v.name}, maxiter=4)[0]"
    )


# -- Fourier transforms --------------------------------------------------------------------------

_FFT = {
    "fft": ("jnp.fft.fft({x}, axis={a}, norm='ortho')", False),
    "ifft_real": ("jnp.real(jnp.fft.ifft({x} * (1 + 0.5j), axis={a}, norm='ortho'))", False),
    "rfft": ("jnp.fft.rfft({x}, axis={a}, norm='ortho')", True),
    "irfft": ("jnp.fft.irfft(jnp.fft.rfft({x}, axis={a}), n={n}, axis={a})", False),
    "fft_filter": (
        "jnp.real(jnp.fft.ifft(jnp.fft.fft({x}, axis={a}) * 0.5, axis={a}))", False
    ),
    "power_spectrum": ("jnp.abs(jnp.fft.rfft({x}, axis={a}, norm='ortho') + 0.7)", True),
    "fftshift": ("jnp.fft.fftshift({x}, axes={a})", False),
}  # fmt: skip


def _fft(name: str, text: str, shrinks: bool) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if v.dtype != "float32":
            raise Unfit
        axis = w.axis(v, draw, 3)
        made = text.format(x=v.name, a=axis, n=v.dim(axis))
        return w.let(made, None if shrinks and axis == v.rows else v.rows)


for _name, (_text, _shrinks) in _FFT.items():
    _fft(_name, _text, _shrinks)


@op("fft2")
def _fft2(w: Writer, v: Value, draw: Draw) -> Value:
    fit = [a for a in w.axes(v) if v.shape[a] > 1]
    if v.dtype != "float32" or len(fit) < 2:
        raise Unfit
    axes = tuple(sorted(draw.some(fit, 2)))
    return w.let(f"jnp.fft.fft2({v.name}, axes={axes}, norm='ortho')", v.rows)


# -- random draws --------------------------------------------------------------------------------

_RANDOM = {
    "random_uniform": "{x} + 0.3 * jax.random.uniform({k}, {x}.shape)",
    "random_normal": "{x} + 0.3 * jax.random.normal({k}, {x}.shape)",
    "random_bernoulli": "jnp.where(jax.random.bernoulli({k}, 0.6, {x}.shape), {x}, 0.1)",
    "dropout": "jnp.where(jax.random.bernoulli({k}, 0.8, {x}.shape), {x} / 0.8, 0.0)",
    "random_truncated": "{x} + 0.3 * jax.random.truncated_normal({k}, -1.0, 1.0, {x}.shape)",
    "random_gumbel": "{x} + 0.2 * jax.random.gumbel({k}, {x}.shape)",
    "random_exponential": "{x} + 0.2 * jax.random.exponential({k}, {x}.shape)",
    "random_laplace": "{x} + 0.2 * jax.random.laplace({k}, {x}.shape)",
    "random_logistic": "{x} + 0.2 * jax.random.logistic({k}, {x}.shape)",
    "random_cauchy": "{x} + 0.2 * jnp.tanh(jax.random.cauchy({k}, {x}.shape))",
    "random_rademacher": "{x} * jax.random.rademacher({k}, {x}.shape)",
    "random_randint": "{x} + jax.random.randint({k}, {x}.shape, -3, 4) * 0.2",
    "random_bits": "jax.random.bits({k}, {x}.shape, 'uint8')",
    "random_bfloat16": "{x} + jax.random.normal({k}, {x}.shape, jnp.bfloat16) * 0.2",
    "random_split": "{x} + 0.2 * sum(jax.random.normal(k, {x}.shape) for k in "
    "jax.random.split({k}, 2))",
    "random_raw_key": "{x} + 0.2 * jax.random.normal(jax.random.PRNGKey(7), {x}.shape)",
}


def _random(name: str, text: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if v.dtype != "float32":
            raise Unfit
        return w.let(text.format(x=v.name, k=w.key()), v.rows)


for _name, _text in _RANDOM.items():
    _random(_name, _text)


@op("random_categorical")
def _categorical(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32":
        raise Unfit
    axis = w.axis(v, draw, 2)
    return w.let(f"jax.random.categorical({w.key()}, {v.name}, axis={axis})", left(v, axis))


@op("random_permutation")
def _permutation(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 2)
    rows = None if v.rows == axis else v.rows
    return w.let(
        f"jnp.take({v.name}, jax.random.permutation({w.key()}, {v.dim(axis)}), {axis})", rows
    )


@op("random_choice")
def _choice(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 4)
    rows = None if v.rows == axis else v.rows
    return w.let(f"jax.random.choice({w.key()}, {v.name}, (3,), axis={axis})", rows)


@op("random_key_a_row")
def _key_a_row(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rows != 0 or v.rank < 2:
        raise Unfit
    x = v.name
    return w.let(
        f"jax.vmap(lambda k, r: r + 0.3 * jax.random.normal(k, r.shape))"
        f"(jax.random.split({w.key()}, {v.dim(0)}), {x})",
        0,
    )


@op("random_fold_row")
def _fold_row(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rows != 0 or v.rank < 2:
        raise Unfit
    x = v.name
    return w.let(
        f"jax.vmap(lambda i, r: r + 0.3 * jax.random.uniform(jax.random.fold_in({w.key()}, i), "
        f"r.shape))"
        f"(jnp.arange({v.dim(0)}), {x})",
        0,
    )


# -- control flow inside a body ------------------------------------------------------------------

_CONTROL = {
    "cond_scalar": "lax.cond({k}, jnp.sin, lambda t: t * 0.5, {x})",
    "switch_scalar": (
        "lax.switch(jax.random.randint({k}, (), 0, 3), [jnp.sin, lambda t: t * 0.5, jnp.tanh], {x})"
    ),
    "fori_scalar": "lax.fori_loop(0, 3, lambda i, t: jnp.tanh(t) + 0.1 * i, {x})",
    "while_count": (
        "lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1]) * 1.1), "
        "(0, lax.stop_gradient({x})))[1]"
    ),
    "while_vmapped": (
        "jax.vmap(lambda r: lax.while_loop(lambda c: jnp.max(jnp.abs(c)) > 0.913, lambda c: c * "
        "0.7, r))"
        "(lax.stop_gradient({x}))"
    ),
    "map_features": "jnp.moveaxis(lax.map(jnp.sin, jnp.moveaxis({x}, -1, 0)), 0, -1)",
    "cond_vmapped": (
        "jax.vmap(lambda r: lax.cond(jnp.mean(r) > 0.117, lambda r: jnp.sin(r) * 2, lambda r: -r, "
        "r))({x})"
    ),
    "switch_vmapped": (
        "jax.vmap(lambda r: lax.switch(jnp.argmax(r.reshape(-1)[:3]), "
        "[jnp.sin, jnp.cos, lambda r: r * 0.3], r))({x})"
    ),
    "fori_dynamic": (
        "lax.fori_loop(0, jax.random.randint({k}, (), 1, 4), lambda i, t: jnp.sin(t) + 0.2, "
        "lax.stop_gradient({x}))"
    ),
    "newton": (
        "lax.fori_loop(0, 4, lambda i, t: 0.5 * (t + (jnp.abs({x}) + 0.5) / t), jnp.ones_like({x}))"
    ),
    "scan_in_vmap": (
        "jax.vmap(lambda r: lax.scan(lambda c, t: (c * 0.5 + t, c), jnp.zeros(r.shape[1:]), "
        "r)[1])({x})"
    ),
}


def _control(name: str, text: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if v.dtype != "float32" or not v.rank or v.rows not in (0, None):
            raise Unfit
        if "vmap" in name and v.rank < 2:
            raise Unfit
        if name == "map_features" and v.rank - 1 == v.rows:
            raise Unfit
        key = w.key()
        if name == "cond_scalar":
            key = f"jax.random.bernoulli({key})"
        return w.let(text.format(x=v.name, k=key), v.rows)


for _name, _text in _CONTROL.items():
    _control(_name, _text)


@op("bisection")
def _bisection(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32":
        raise Unfit
    axis = w.axis(v, draw, 2)
    x, fun = f"lax.stop_gradient({v.name})", w.name("step")
    w.define(
        f"def {fun}(i, ends):\n"
        f"    mid = 0.5 * (ends[0] + ends[1])\n"
        f"    over = jnp.mean(jnp.tanh({v.name} - mid), {axis}, keepdims=True) > 0.0\n"
        f"    return jnp.where(over, mid, ends[0]), jnp.where(over, ends[1], mid)"
    )
    low = f"jnp.min({x}, {axis}, keepdims=True) - 0.1"
    high = f"jnp.max({x}, {axis}, keepdims=True) + 0.2"
    root = w.let(f"lax.stop_gradient(lax.fori_loop(0, 6, {fun}, ({low}, {high}))[0])", v.rows)
    return w.let(f"{v.name} - {root.name}", v.rows)
