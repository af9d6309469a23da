"""Op kinds of models: products, convolutions, pooling, attention, recurrences, experts."""

from __future__ import annotations

from tests.fuzz.draw import Draw
from tests.fuzz.writing import Unfit, Value, Writer, op


def _features(w: Writer, v: Value, least: int = 1, most: int = 4) -> None:
    """Raise Unfit unless the last axis holds float32 features."""
    if v.dtype != "float32" or not least <= v.rank <= most or v.rank - 1 == v.rows:
        raise Unfit


def _width(draw: Draw) -> int:
    return draw.one((8, 8, 16, 16, 24, 32, 7, 12))


@op("linear")
def _linear(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    out = _width(draw)
    return w.let(f"{v.name} @ {w.param(v.shape[-1], out)} + {w.param(out, scale=0.1)}", v.rows)


@op("mlp")
def _mlp(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    wide = draw.one((16, 32, 64, 24))
    act = draw.one(("jnp.tanh", "jax.nn.gelu", "jax.nn.relu", "jax.nn.silu"))
    hidden = w.let(f"{act}({v.name} @ {w.param(v.shape[-1], wide)} + {w.param(wide, scale=0.1)})",
                   v.rows)  # fmt: skip
    return w.let(f"{hidden.name} @ {w.param(wide, v.shape[-1])}", v.rows)


@op("gated_mlp")
def _gated_mlp(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    wide, d = draw.one((16, 32)), v.shape[-1]
    both = w.let(f"{v.name} @ {w.param(d, 2 * wide)}", v.rows)
    return w.let(
        f"(jax.nn.silu({both.name}[..., :{wide}]) * {both.name}[..., {wide}:]) @ "
        f"{w.param(wide, d)}",
        v.rows,
    )


@op("tied_linear")
def _tied_linear(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    table = w.param(v.shape[-1], 16)
    return w.let(f"jnp.tanh({v.name} @ {table}) @ {table}.T", v.rows)


@op("low_precision_linear")
def _low_linear(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    dtype = draw.one(("jnp.bfloat16", "jnp.float16"))
    table = w.param(v.shape[-1], _width(draw))
    return w.let(
        f"lax.dot_general({v.name}.astype({dtype}), {table}.astype({dtype}), "
        f"((({v.rank - 1},), (0,)), ((), ())), preferred_element_type=jnp.float32)",
        v.rows,
    )


@op("int8_linear")
def _int8_linear(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    table = w.param(v.shape[-1], 8)
    return w.let(
        f"lax.dot_general(jnp.round(jnp.tanh(lax.stop_gradient({v.name})) * 50).astype(jnp.int8), "
        f"jnp.round(jnp.tanh(lax.stop_gradient({table})) * 50).astype(jnp.int8), "
        f"((({v.rank - 1},), (0,)), ((), ())), preferred_element_type=jnp.int32) / 5000",
        v.rows,
    )


_EINSUMS = (  # letters of the value without its rows, of the parameter, of the result
    (1, "d", "df", "f"),
    (1, "d", "fd", "f"),
    (1, "d", "dfg", "gf"),
    (1, "d", "de", "de"),
    (2, "td", "df", "tf"),
    (2, "td", "ts", "sd"),
    (2, "td", "tdf", "f"),
    (2, "td", "df", "ft"),
    (2, "td", "tdf", "tf"),
    (3, "xyc", "cf", "fxy"),
    (3, "xyc", "xz", "zyc"),
)


@op("einsum")
def _einsum(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rows not in (0, None):
        raise Unfit
    inner = v.rank - (v.rows == 0)
    fit = [e for e in _EINSUMS if e[0] == inner]
    if not fit:
        raise Unfit
    _, mine, theirs, out = draw.one(fit)
    sizes = dict(zip(mine, v.shape[v.rank - inner :], strict=True))
    for letter in theirs:
        sizes.setdefault(letter, draw.one((4, 6, 8, 16)))
    table = w.param(*(sizes[c] for c in theirs))
    row = "b" if v.rows == 0 else ""
    return w.let(f'jnp.einsum("{row}{mine},{theirs}->{row}{out}", {v.name}, {table}) * 0.5', v.rows)


@op("einsum_self")
def _einsum_self(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rows not in (0, None) or v.rank - (v.rows == 0) != 2:
        raise Unfit
    row = "b" if v.rows == 0 else ""
    text = draw.one(("{r}td,{r}sd->{r}ts", "{r}td,{r}te->{r}de", "{r}td,{r}td->{r}t"))
    made = text.format(r=row)
    return w.let(f'jnp.einsum("{made}", {v.name}, jnp.tanh({v.name})) / {v.shape[-1]}', v.rows)


@op("outer_rows")
def _outer_rows(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank != 2 or v.rows != 0:
        raise Unfit
    return w.let(f"{v.name}[:, :, None] * jnp.tanh({v.name})[:, None, :4]", 0)


@op("gram_rows")
def _gram_rows(w: Writer, v: Value, draw: Draw) -> Value:
    if not w.mixes or v.dtype != "float32" or v.rank != 2 or v.rows != 0:
        raise Unfit
    made = w.let(f"jax.nn.softmax({v.name} @ {v.name}.T / 4, axis=-1)", 0)
    return w.let(f"{made.name} @ {v.name}", 0)


@op("tensordot")
def _tensordot(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    return w.let(f"jnp.tensordot({v.name}, {w.param(v.shape[-1], 3, 4)}, 1) * 0.5", v.rows)


@op("inner")
def _inner(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    return w.let(f"jnp.inner({v.name}, {w.param(8, v.shape[-1], scale=0.3)})", v.rows)


@op("vdot_rows")
def _vdot_rows(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v, 2)
    return w.let(f"jnp.vecdot({v.name}, jnp.cos({v.name})) / {v.shape[-1]}", v.rows)


@op("kron")
def _kron(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank != 1 or v.rows is not None:
        raise Unfit
    return w.let(f"jnp.kron({v.name}, {w.param(3, scale=0.7)})")


@op("batched_matmul")
def _batched_matmul(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v, 3, 4)
    if v.rows not in (0, None):
        raise Unfit
    heads = v.shape[-3] if v.rows != v.rank - 3 else 0
    table = w.param(heads, v.shape[-1], 8) if heads else w.param(v.shape[-1], 8)
    return w.let(f"jnp.matmul({v.name}, {table})", v.rows)


@op("cross")
def _cross(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v)
    if v.shape[-1] < 3:
        raise Unfit
    return w.let(f"jnp.cross({v.name}[..., :3], {w.param(3, scale=0.6)})", v.rows)


@op("polynomial_convolve")
def _convolve(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or v.rank != 1 or v.rows is not None or v.shape[0] < 3:
        raise Unfit
    return w.let(f"jnp.convolve({v.name}, {w.param(3, scale=0.5)}, mode='same')")


# -- convolutions and pooling ------------------------------------------------------------------


def _as_image(w: Writer, v: Value, spatial: int) -> Value:
    """The value with an axis of rows in front, `spatial` axes and one of channels."""
    wanted = spatial + 2
    if v.dtype != "float32" or v.rank - (v.rows == 0) != spatial + 1 or v.rows not in (0, None):
        raise Unfit
    return v if v.rank == wanted else w.let(f"{v.name}[None]")


def _back(w: Writer, made: Value, v: Value) -> Value:
    return made if v.rows == 0 else w.let(f"{made.name}[0]")


def _conv(name: str, spatial: int, how: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        image = _as_image(w, v, spatial)
        c = image.shape[-1]
        out, groups, more = _width(draw), 1, ""
        ones = (1,) * spatial
        strides = ones
        if how == "strided":
            strides = (2,) * spatial
        if how == "dilated":
            more += f", rhs_dilation={(2,) * spatial}"
        if how == "upsampled":
            more += f", lhs_dilation={(2,) * spatial}"
        if how == "grouped":
            groups = next((g for g in (2, 3, 4) if c % g == 0), 0)
            if not groups:
                raise Unfit
            out = 4 * groups
        if how == "depthwise":
            groups, out = c, c * draw.one((1, 2))
        if groups > 1:
            more += f", feature_group_count={groups}"
        padding: object = draw.one(("SAME", "VALID") if min(image.shape[1:-1]) > 5 else ("SAME",))
        if how == "upsampled":
            padding = [(1, 1)] * spatial
        kernel = w.param(*(3,) * spatial, c // groups, out, scale=(3**spatial * c / groups) ** -0.5)
        letters = "NHWC"[: spatial + 1] + "C"
        spec = ("NWC", "WIO", "NWC") if spatial == 1 else ("NHWC", "HWIO", "NHWC")
        assert len(letters) >= spatial
        made = w.let(
            f"lax.conv_general_dilated({image.name}, {kernel}, {strides}, {padding!r}"
            f"{more}, dimension_numbers={spec})",
            v.rows,
        )
        return _back(w, made, v)


for _spatial in (1, 2):
    for _how in ("plain", "strided", "dilated", "upsampled", "grouped", "depthwise"):
        _conv(f"conv{_spatial}d_{_how}", _spatial, _how)


@op("conv_transpose")
def _conv_transpose(w: Writer, v: Value, draw: Draw) -> Value:
    image = _as_image(w, v, 2)
    kernel = w.param(2, 2, image.shape[-1], 6, scale=0.3)
    made = w.let(
        f"lax.conv_transpose({image.name}, {kernel}, (2, 2), 'SAME', "
        "dimension_numbers=('NHWC', 'HWIO', 'NHWC'))",
        v.rows,
    )
    return _back(w, made, v)


@op("conv_nchw")
def _conv_nchw(w: Writer, v: Value, draw: Draw) -> Value:
    image = _as_image(w, v, 2)
    kernel = w.param(8, image.shape[-1], 3, 3, scale=0.2)
    made = w.let(
        f"lax.conv(jnp.transpose({image.name}, (0, 3, 1, 2)), {kernel}, (1, 1), 'SAME')", v.rows
    )
    return _back(w, made, v)


@op("conv_patches")
def _conv_patches(w: Writer, v: Value, draw: Draw) -> Value:
    image = _as_image(w, v, 2)
    made = w.let(
        f"lax.conv_general_dilated_patches({image.name}, (2, 2), (1, 1), 'VALID', "
        "dimension_numbers=('NHWC', 'HWIO', 'NHWC'))",
        v.rows,
    )
    return _back(w, made, v)


@op("patch_embedding")
def _patches(w: Writer, v: Value, draw: Draw) -> Value:
    image = _as_image(w, v, 2)
    _, height, width, c = image.shape
    if height % 2 or width % 2:
        raise Unfit
    cut = w.let(
        f"{image.name}.reshape({image.dim(0)}, {height // 2}, 2, {width // 2}, 2, {c})", v.rows
    )
    made = w.let(
        f"jnp.transpose({cut.name}, (0, 1, 3, 2, 4, 5)).reshape({cut.dim(0)}, "
        f"{height * width // 4}, {4 * c}) @ {w.param(4 * c, 16)}",
        v.rows,
    )
    return _back(w, made, v)


def _pool(name: str, text: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        image = _as_image(w, v, 2)
        stride = draw.one((1, 2))
        padding = draw.one(("SAME", "VALID"))
        made = text.format(x=image.name, s=stride, p=padding)
        return _back(w, w.let(made, v.rows), v)


_pool(
    "max_pool", "lax.reduce_window({x}, -jnp.inf, lax.max, (1, 3, 3, 1), (1, {s}, {s}, 1), '{p}')"
)
_pool("avg_pool", "lax.reduce_window({x}, 0.0, lax.add, (1, 2, 2, 1), (1, {s}, {s}, 1), '{p}') / 4")
_pool("min_pool", "lax.reduce_window({x}, jnp.inf, lax.min, (1, 2, 2, 1), (1, {s}, {s}, 1), '{p}')")
_pool("image_resize", "jax.image.resize({x}, (*{x}.shape[:1], 6, 5, {x}.shape[3]), 'bilinear')")
_pool("image_nearest", "jax.image.resize({x}, (*{x}.shape[:1], 8, 8, {x}.shape[3]), 'nearest')")


# -- sequences -----------------------------------------------------------------------------------


def _sequence(w: Writer, v: Value, most: int = 32) -> None:
    """Raise Unfit unless the value is [rows,] time, features."""
    if v.dtype != "float32" or v.rows not in (0, None) or v.rank - (v.rows == 0) != 2:
        raise Unfit
    if v.shape[-2] > most or v.shape[-2] < 2:
        raise Unfit


def _heads(w: Writer, v: Value, heads: int, size: int) -> Value:
    dims = "".join(f"{v.dim(a)}, " for a in range(v.rank - 1))
    table = w.param(v.shape[-1], heads * size)
    return w.let(f"({v.name} @ {table}).reshape({dims}{heads}, {size})", v.rows)


def _attention(name: str, mask: str, kv_heads: int, query_heads: int) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        _sequence(w, v)
        size, t = draw.one((4, 8)), v.shape[-2]
        q = _heads(w, v, query_heads, size)
        k, u = _heads(w, v, kv_heads, size), _heads(w, v, kv_heads, size)
        if kv_heads != query_heads:
            times = query_heads // kv_heads
            k = w.let(f"jnp.repeat({k.name}, {times}, axis=-2)", v.rows)
            u = w.let(f"jnp.repeat({u.name}, {times}, axis=-2)", v.rows)
        row = "b" if v.rows == 0 else ""
        score = w.let(
            f'jnp.einsum("{row}qhd,{row}khd->{row}hqk", {q.name}, {k.name}) / {size**0.5:.4f}',
            v.rows,
        )
        x = score.name
        if mask == "causal":
            score = w.let(f"jnp.where(jnp.tril(jnp.ones(({t}, {t}), bool)), {x}, -1e9)", v.rows)
        if mask == "alibi":
            score = w.let(
                f"{x} - 0.1 * jnp.abs(jnp.arange({t})[:, None] - jnp.arange({t}))", v.rows
            )
        if mask == "padding":
            if "lengths" not in w.batch or v.rows != 0:
                raise Unfit
            score = w.let(
                f'jnp.where(jnp.arange({t}) <= batch["lengths"][:, None, None, None] % {t}, '
                f"{x}, -1e9)",
                v.rows,
            )
        share = w.let(f"jax.nn.softmax({score.name}, -1)", v.rows)
        mixed = w.let(f'jnp.einsum("{row}hqk,{row}khd->{row}qhd", {share.name}, {u.name})', v.rows)
        dims = "".join(f"{v.dim(a)}, " for a in range(v.rank - 1))
        table = w.param(query_heads * size, v.shape[-1])
        return w.let(f"{mixed.name}.reshape({dims}-1) @ {table}", v.rows)


_attention("attention", "", 4, 4)
_attention("causal_attention", "causal", 2, 2)
_attention("grouped_query_attention", "causal", 2, 4)
_attention("multi_query_attention", "", 1, 4)
_attention("alibi_attention", "alibi", 2, 2)
_attention("padded_attention", "padding", 2, 2)


@op("dot_product_attention")
def _library_attention(w: Writer, v: Value, draw: Draw) -> Value:
    _sequence(w, v)
    if v.rows != 0:
        raise Unfit
    kv = draw.one((1, 2, 4))
    q, k, u = _heads(w, v, 4, 4), _heads(w, v, kv, 4), _heads(w, v, kv, 4)
    causal = draw.chance(0.5)
    made = w.let(
        f"jax.nn.dot_product_attention({q.name}, {k.name}, {u.name}, is_causal={causal})", 0
    )
    return w.let(f"{made.name}.reshape({v.dim(0)}, {v.dim(1)}, -1) @ {w.param(16, v.shape[-1])}", 0)


@op("linear_attention")
def _linear_attention(w: Writer, v: Value, draw: Draw) -> Value:
    _sequence(w, v)
    row = "b" if v.rows == 0 else ""
    q = w.let(f"jax.nn.elu({v.name} @ {w.param(v.shape[-1], 8)}) + 1.1", v.rows)
    k = w.let(f"jax.nn.elu({v.name} @ {w.param(v.shape[-1], 8)}) + 1.1", v.rows)
    kv = w.let(f'jnp.einsum("{row}tk,{row}td->{row}kd", {k.name}, {v.name})', v.rows)
    norm = w.let(f'jnp.einsum("{row}tk,{row}k->{row}t", {q.name}, {k.name}.sum(-2))', v.rows)
    return w.let(
        f'jnp.einsum("{row}tk,{row}kd->{row}td", {q.name}, {kv.name}) / ({norm.name}[..., '
        f"None] + 0.5)",
        v.rows,
    )


@op("rotary")
def _rotary(w: Writer, v: Value, draw: Draw) -> Value:
    _sequence(w, v)
    half = v.shape[-1] // 2
    if not half or v.shape[-1] % 2:
        raise Unfit
    angle = w.let(f"jnp.arange({v.shape[-2]})[:, None] / 10.0 ** (jnp.arange({half}) / {half})")
    one, two = f"{v.name}[..., :{half}]", f"{v.name}[..., {half}:]"
    c, s = f"jnp.cos({angle.name})", f"jnp.sin({angle.name})"
    return w.let(f"jnp.concatenate([{one} * {c} - {two} * {s}, {one} * {s} + {two} * {c}], -1)",
                 v.rows)  # fmt: skip


@op("positions")
def _positions(w: Writer, v: Value, draw: Draw) -> Value:
    _sequence(w, v)
    return w.let(f"{v.name} + {w.param(v.shape[-2], v.shape[-1], scale=0.3)}", v.rows)


@op("shifted_tokens")
def _shifted(w: Writer, v: Value, draw: Draw) -> Value:
    _sequence(w, v)
    lead = "(0, 0), " if v.rows == 0 else ""
    return w.let(f"jnp.pad({v.name}, ({lead}(1, 0), (0, 0)))[..., :-1, :]", v.rows)


def _recurrence(name: str, cell: str, gates: int, carry: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        _sequence(w, v)
        d, hidden = v.shape[-1], draw.one((8, 8, 12))
        fun = w.name("cell")
        wx, wh = w.param(d, gates * hidden), w.param(hidden, gates * hidden)
        w.define(cell.format(f=fun, wx=wx, wh=wh, n=hidden))
        time = f"jnp.moveaxis({v.name}, -2, 0)"
        start = f"jnp.zeros(({'' if v.rows is None else v.dim(0) + ', '}{hidden}))"
        made = w.let(f"lax.scan({fun}, {carry.format(z=start)}, {time})[1]",
                     None if v.rows is None else 1)  # fmt: skip
        return w.let(f"jnp.moveaxis({made.name}, 0, -2)", v.rows)


_recurrence(
    "rnn_scan",
    "def {f}(c, t):\n    c = jnp.tanh(t @ {wx} + c @ {wh})\n    return c, c",
    1,
    "{z}",
)
_recurrence(
    "gru_scan",
    "def {f}(c, t):\n"
    "    r, z, n = jnp.split(t @ {wx}, 3, -1)\n"
    "    rr, zz, nn = jnp.split(c @ {wh}, 3, -1)\n"
    "    n = jnp.tanh(n + jax.nn.sigmoid(r + rr) * nn)\n"
    "    c = c + jax.nn.sigmoid(z + zz) * (n - c)\n"
    "    return c, c",
    3,
    "{z}",
)
_recurrence(
    "lstm_scan",
    "def {f}(c, t):\n"
    "    i, g, f, o = jnp.split(t @ {wx} + c[0] @ {wh}, 4, -1)\n"
    "    cell = jax.nn.sigmoid(f + 1) * c[1] + jax.nn.sigmoid(i) * jnp.tanh(g)\n"
    "    h = jax.nn.sigmoid(o) * jnp.tanh(cell)\n"
    "    return (h, cell), h",
    4,
    "({z}, {z})",
)


@op("state_space")
def _state_space(w: Writer, v: Value, draw: Draw) -> Value:
    _sequence(w, v)
    decay = w.param(v.shape[-1], scale=0.5)
    axis = v.rank - 2
    gate = w.let(f"jnp.broadcast_to(jax.nn.sigmoid({decay}), {v.name}.shape)", v.rows)
    return w.let(
        f"lax.associative_scan(lambda l, r: (l[0] * r[0], r[1] + r[0] * l[1]), "
        f"({gate.name}, {v.name}), axis={axis})[1] * 0.5",
        v.rows,
    )


# -- experts -------------------------------------------------------------------------------------


@op("mixture_dense")
def _mixture_dense(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v, 1, 3)
    d, experts = v.shape[-1], draw.one((2, 4, 8))
    gate = w.let(f"jax.nn.softmax({v.name} @ {w.param(d, experts)}, -1)", v.rows)
    up, down = w.param(experts, d, 8), w.param(experts, 8, d)
    each = w.let(f'jnp.tanh(jnp.einsum("...d,edf->...ef", {v.name}, {up}))', v.rows)
    return w.let(
        f'jnp.einsum("...e,...ef,efd->...d", {gate.name}, {each.name}, {down})', v.rows
    )  # fmt: skip


@op("mixture_top_2")
def _mixture_top(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v, 2, 3)
    d, experts = v.shape[-1], 4
    logits = w.let(f"{v.name} @ {w.param(d, experts)}", v.rows)
    best = w.let(f"lax.top_k({logits.name}, 2)[0]", v.rows)
    gate = w.let(
        f"jax.nn.softmax(jnp.where({logits.name} >= {best.name}[..., -1:], {logits.name}, "
        f"-1e9), -1)",
        v.rows,
    )
    tables = w.param(experts, d, d)
    return w.let(f'jnp.einsum("...e,...d,edf->...f", {gate.name}, {v.name}, {tables})', v.rows)


@op("mixture_capacity")
def _mixture_capacity(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v, 2, 2)
    if not w.mixes and v.rows is not None:
        raise Unfit
    d, experts, room = v.shape[-1], 4, max(2, v.shape[0] // 3)
    logits = w.let(f"{v.name} @ {w.param(d, experts)}", v.rows)
    pick = w.let(f"jax.nn.one_hot(jnp.argmax({logits.name}, -1), {experts})", v.rows)
    place = w.let(f"(jnp.cumsum({pick.name}, 0) - 1) * {pick.name}", v.rows)
    send = w.let(
        f"jax.nn.one_hot(jnp.where({pick.name} > 0, {place.name}, -1).astype(jnp.int32), {room})",
        v.rows,
    )
    inside = w.let(f'jnp.einsum("bec,bd->ecd", {send.name}, {v.name})')
    made = w.let(f'jnp.tanh(jnp.einsum("ecd,edf->ecf", {inside.name}, {w.param(experts, d, d)}))')
    gate = f"(jax.nn.softmax({logits.name}, -1) * {pick.name})"
    return w.let(f'jnp.einsum("bec,ecd,be->bd", {send.name}, {made.name}, {gate})', v.rows)


@op("codebook")
def _codebook(w: Writer, v: Value, draw: Draw) -> Value:
    _features(w, v, 2, 3)
    book = w.param(6, v.shape[-1], scale=0.7)
    gap = w.let(f"jnp.sum(({v.name}[..., None, :] - {book}) ** 2, -1)", v.rows)
    near = w.let(f"{book}[jnp.argmin({gap.name}, -1)]", v.rows)
    return w.let(
        f"{v.name} + lax.stop_gradient({near.name} - {v.name}) + 0.1 * {near.name}", v.rows
    )
