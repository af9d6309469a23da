"""Op kinds that move items: reshapes, joins, cuts, gathers, scatters, sorts."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.draw import Draw
from tests.fuzz.writing import Unfit, Value, Writer, op


def moved(value: Value, order: list[int]) -> int | None:
    """Where the rows are after a transpose."""
    return None if value.rows is None else order.index(value.rows)


def left(value: Value, axis: int) -> int | None:
    """Where the rows are once an axis is gone."""
    if value.rows is None or value.rows == axis:
        return None
    return value.rows - (axis < value.rows)


def _kept(value: Value, axis: int) -> int | None:
    """Where the rows are after items along an axis were mixed or their number changed."""
    return None if value.rows == axis else value.rows


def _reordered(v: Value, draw: Draw) -> list[int]:
    return list(draw.some(range(v.rank), v.rank))


@op("transpose")
def _transpose(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank < 2:
        raise Unfit
    order = _reordered(v, draw)
    return w.let(f"jnp.transpose({v.name}, {tuple(order)})", moved(v, order))


@op("swapaxes")
def _swapaxes(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank < 2:
        raise Unfit
    a, b = draw.some(range(v.rank), 2)
    order = list(range(v.rank))
    order[a], order[b] = b, a
    return w.let(f"jnp.swapaxes({v.name}, {a}, {b})", moved(v, order))


@op("moveaxis")
def _moveaxis(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank < 2:
        raise Unfit
    a, b = draw.below(v.rank), draw.below(v.rank)
    order = [i for i in range(v.rank) if i != a]
    order.insert(b, a)
    return w.let(f"jnp.moveaxis({v.name}, {a}, {b})", moved(v, order))


@op("expand_dims")
def _expand_dims(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank > 4:
        raise Unfit
    axis = draw.below(v.rank + 1)
    rows = None if v.rows is None else v.rows + (axis <= v.rows)
    return w.let(f"jnp.expand_dims({v.name}, {axis})", rows)


@op("squeeze")
def _squeeze(w: Writer, v: Value, draw: Draw) -> Value:
    ones = [a for a, s in enumerate(v.shape) if s == 1 and a != v.rows]
    if not ones:
        raise Unfit
    axis = draw.one(ones)
    return w.let(f"jnp.squeeze({v.name}, {axis})", left(v, axis))


@op("broadcast_to")
def _broadcast_to(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank > 4:
        raise Unfit
    rows = None if v.rows is None else v.rows + 1
    return w.let(f"jnp.broadcast_to({v.name}, (3, {v.dims()}))", rows)


@op("reshape_merge")
def _reshape_merge(w: Writer, v: Value, draw: Draw) -> Value:
    fit = [a for a in range(v.rank - 1) if w.mixes or v.rows not in (a, a + 1)]
    if not fit:
        raise Unfit
    axis = draw.one(fit)
    dims = [v.dim(a) for a in range(v.rank) if a != axis]
    dims[axis] = "-1"
    rows = v.rows
    if rows is not None:
        rows = None if rows in (axis, axis + 1) else rows - (rows > axis)
    return w.let(f"{v.name}.reshape({', '.join(dims)})", rows)


@op("reshape_split")
def _reshape_split(w: Writer, v: Value, draw: Draw) -> Value:
    fit = [
        (a, k) for a in w.axes(v) for k in (2, 3, 4)
        if v.shape[a] % k == 0 and v.shape[a] > k and v.rank < 5 and a != v.rows
    ]  # fmt: skip
    if not fit:
        raise Unfit
    axis, parts = draw.one(fit)
    dims = [v.dim(a) for a in range(v.rank)]
    dims[axis : axis + 1] = [str(parts), "-1"] if draw.chance(0.5) else ["-1", str(parts)]
    rows = None if v.rows is None else v.rows + (v.rows > axis)
    return w.let(f"{v.name}.reshape({', '.join(dims)})", rows)


@op("reshape_split_rows")
def _reshape_split_rows(w: Writer, v: Value, draw: Draw) -> Value:
    if not w.mixes or v.rows is None or v.shape[v.rows] % 4 or v.rank > 4:
        raise Unfit
    dims = [v.dim(a) for a in range(v.rank)]
    dims[v.rows : v.rows + 1] = ["4", "-1"] if draw.chance(0.5) else ["-1", "4"]
    return w.let(f"{v.name}.reshape({', '.join(dims)})")


@op("ravel_rows")
def _ravel_rows(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rows != 0 or v.rank < 3:
        raise Unfit
    flat = w.let(f"{v.name}.reshape(-1, {v.dim(-1)})")
    made = w.let(f"jnp.sin({flat.name} @ {w.param(v.shape[-1], 8)})" if v.dtype == "float32" else
                 f"{flat.name} + {flat.name}")  # fmt: skip
    dims = "".join(f"{v.dim(a)}, " for a in range(v.rank - 1))
    return w.let(f"{made.name}.reshape({dims}-1)", 0)


def _template(name: str, text: str, least: int = 2, rank: int = 1) -> None:
    """Enter an op along one axis `{a}` that keeps the number of axes."""

    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if v.rank < rank:
            raise Unfit
        axis = w.axis(v, draw, least)
        whole = text.format(x=v.name, a=axis, n=v.dim(axis), k=1 + draw.below(3))
        return w.let(whole, _kept(v, axis))


_template("roll", "jnp.roll({x}, {k}, {a})")
_template("flip", "jnp.flip({x}, {a})")
_template("repeat", "jnp.repeat({x}, 2, {a})", 1)
_template("concatenate", "jnp.concatenate([{x}, {x}[::1]], {a})", 1)
_template("append_mean", "jnp.append({x}, {x}.max({a}, keepdims=True), {a})")
_template("diff", "jnp.diff(jnp.where({x} > 0, {x}, 2), axis={a})", 3)
_template("slice", "lax.slice_in_dim({x}, 1, None, 1, {a})", 3)
_template("slice_strided", "lax.slice_in_dim({x}, 0, None, 2, {a})", 3)
_template("dynamic_slice", "lax.dynamic_slice_in_dim({x}, jnp.int32({k}), {n} - 2, {a})", 4)
_template("take_constant", "jnp.take({x}, jnp.array([1, 0, 0, 1]), {a})")
_template("take_clip", "jnp.take({x}, jnp.arange({n}) * 2, axis={a}, mode='clip')", 3)
_template("compress_reverse", "jnp.take({x}, jnp.arange({n})[::-1], axis={a})")
_template("split_join", "jnp.concatenate(jnp.array_split({x}, 2, {a})[::-1], {a})")
_template("split_add", "sum(jnp.array_split(jnp.concatenate([{x}, {x}], {a}), 2, {a}))")
_template("dynamic_index", "lax.dynamic_index_in_dim({x}, jnp.int32({k} % 2), {a})")
_template("sort", "jnp.sort({x}, {a})")
_template("argsort", "jnp.argsort({x}, {a}, stable=True)")
_template("sort_descending", "jnp.sort({x}, {a}, descending=True)")
_template("sort_by_key", "lax.sort(({x}, {x} * 2), dimension={a}, num_keys=1)[1]")
_template("take_along_axis", "jnp.take_along_axis({x}, jnp.argsort({x}, {a}), {a})")
_template("rank_of", "jnp.argsort(jnp.argsort({x}, {a}), {a})")
_template("tril_mask", "jnp.where(jnp.tril(jnp.ones({x}.shape[-2:], bool)), {x}, 0)", 1, 2)
_template("triu", "jnp.triu({x})", 1, 2)
_template("put_along_axis", (
    "jnp.put_along_axis({x}, jnp.argmax({x}, {a}, keepdims=True), 1, {a}, inplace=False)"
))  # fmt: skip
_template("resize", (
    "jnp.concatenate([jnp.repeat({x}, 2, {a}), jnp.flip({x}, {a})], {a})"
), 1)  # fmt: skip
_template("iota_add", (
    "{x} + jnp.expand_dims(jnp.arange({n}), "
    "tuple(i for i in range({x}.ndim) if i != {a})).astype({x}.dtype)"
), 1)  # fmt: skip
_template("linspace_mul", (
    "{x} * jnp.expand_dims(jnp.linspace(0.5, 1.5, {n}), "
    "tuple(i for i in range({x}.ndim) if i != {a})).astype({x}.dtype)"
), 1)  # fmt: skip


@op("rot90")
def _rot90(w: Writer, v: Value, draw: Draw) -> Value:
    fit = [a for a in range(v.rank) if a != v.rows]
    if len(fit) < 2:
        raise Unfit
    return w.let(f"jnp.rot90({v.name}, axes={tuple(draw.some(fit, 2))})", v.rows)


@op("tile")
def _tile(w: Writer, v: Value, draw: Draw) -> Value:
    counts = [2 if draw.chance(0.5) and a in w.axes(v) else 1 for a in range(v.rank)]
    if not v.rank:
        raise Unfit
    rows = v.rows if v.rows is None or counts[v.rows] == 1 else None
    return w.let(f"jnp.tile({v.name}, {tuple(counts)})", rows)


@op("stack")
def _stack(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank > 4:
        raise Unfit
    axis = draw.below(v.rank + 1)
    rows = None if v.rows is None else v.rows + (axis <= v.rows)
    x = v.name
    return w.let(f"jnp.stack([{x}, {x}[...], {x} * {x}], {axis})", rows)


@op("unstack")
def _unstack(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 2)
    if v.shape[axis] > 8 or axis == v.rows:
        raise Unfit
    parts = w.name("u")
    return w.let(f"(lambda {parts}: {parts}[0] * 2 + {parts}[-1])(jnp.unstack({v.name}, "
                 f"axis={axis}))",
                 left(v, axis))  # fmt: skip


def _pads(w: Writer, v: Value, draw: Draw, most: int = 2) -> list[tuple[int, int]]:
    fit = w.axes(v)
    return [(draw.below(most + 1), draw.below(most + 1)) if a in fit else (0, 0)
            for a in range(v.rank)]  # fmt: skip


def _padded(v: Value, pads: list[tuple[int, int]]) -> int | None:
    return None if v.rows is None or pads[v.rows] != (0, 0) else v.rows


@op("pad")
def _pad(w: Writer, v: Value, draw: Draw) -> Value:
    pads = _pads(w, v, draw)
    if not v.rank:
        raise Unfit
    return w.let(f"jnp.pad({v.name}, {pads})", _padded(v, pads))


@op("pad_mode")
def _pad_mode(w: Writer, v: Value, draw: Draw) -> Value:
    pads = _pads(w, v, draw, 1)
    if not v.rank or min(v.shape) < 2:
        raise Unfit
    mode = draw.one(["edge", "reflect", "wrap", "symmetric"])
    return w.let(f"jnp.pad({v.name}, {pads}, mode={mode!r})", _padded(v, pads))


@op("pad_interior")
def _pad_interior(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 3)
    config = [(-1, 1, 1) if a == axis else (0, 0, 0) for a in range(v.rank)]
    x = v.name
    return w.let(f"lax.pad({x}, jnp.zeros((), {x}.dtype), {config})", _kept(v, axis))


@op("dynamic_update_slice")
def _dynamic_update_slice(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 3)
    x = v.name
    old = f"lax.slice_in_dim({x}, 0, 2, 1, {axis})"
    part = f"~{old}" if v.dtype == "bool" else f"2 * {old}"
    return w.let(
        f"lax.dynamic_update_slice_in_dim({x}, {part}, {draw.below(2)}, {axis})", _kept(v, axis)
    )


@op("diagonal")
def _diagonal(w: Writer, v: Value, draw: Draw) -> Value:
    fit = [a for a in range(v.rank) if a != v.rows]
    if len(fit) < 2:
        raise Unfit
    a, b = sorted(draw.some(fit, 2))
    rows = v.rows
    if rows is not None:
        rows -= (a < rows) + (b < rows)
    return w.let(f"jnp.diagonal({v.name}, 0, {a}, {b})", rows)


@op("at_index")
def _at_index(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 3)
    how = draw.one(["set", "add", "max", "min", "multiply"])
    where = ", ".join(["slice(None)"] * axis + ["1"])
    if v.dtype in ("bool", "complex64") and how != "set":
        raise Unfit
    x = f"lax.stop_gradient({v.name})" if how == "multiply" else v.name
    return w.let(f"{x}.at[({where},)].{how}({2 if v.dtype != 'bool' else True})", _kept(v, axis))


@op("at_array")
def _at_array(w: Writer, v: Value, draw: Draw) -> Value:
    axis = w.axis(v, draw, 3)
    how = draw.one(["add", "max", "min"])
    if not v.is_float:
        raise Unfit
    taken = f"jnp.take({v.name}, jnp.array([2, 1, 2]), axis={axis})"
    where = ", ".join(["slice(None)"] * axis + ["jnp.array([0, 2, 0])"])
    return w.let(f"{v.name}.at[({where},)].{how}(0.5 * {taken})", _kept(v, axis))


@op("boolean_where_nonzero")
def _nonzero(w: Writer, v: Value, draw: Draw) -> Value:
    if v.rank != 1 or v.rows is not None or not (v.is_int or v.dtype == "bool"):
        raise Unfit
    return w.let(f"jnp.nonzero({v.name}, size=5, fill_value=0)[0]")


@op("top_k")
def _top_k(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.rank or v.rank - 1 not in w.axes(v) or v.shape[-1] < 4 or not v.is_float:
        raise Unfit
    return w.let(f"lax.top_k({v.name}, 3)[{draw.below(2)}]", _kept(v, v.rank - 1))


@op("searchsorted")
def _searchsorted(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32":
        raise Unfit
    grid = "jnp.linspace(-2.013, 2.017, 9)"
    return w.let(f"jnp.searchsorted({grid}, {v.name})", v.rows)


@op("digitize")
def _digitize(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32":
        raise Unfit
    return w.let(f"jnp.digitize({v.name}, jnp.array([-0.513, 0.117, 0.719]))", v.rows)


@op("one_hot")
def _one_hot(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_int or v.rank > 3:
        raise Unfit
    return w.let(f"jax.nn.one_hot({v.name} % 5, 5)", v.rows)


@op("embedding")
def _embedding(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_int or v.rank > 3:
        raise Unfit
    return w.let(f"{w.param(8, 6, scale=0.6)}[{v.name} % 8]", v.rows)


@op("embedding_take_fill")
def _embedding_take(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_int or v.rank > 3:
        raise Unfit
    table = w.param(7, 8, scale=0.6)
    return w.let(
        f"jnp.take({table}, {v.name}.astype(jnp.int32) % 9, axis=0, mode='fill', fill_value=0)",
        v.rows,
    )


@op("bincount")
def _bincount(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_int or not (w.mixes or v.rows is None):
        raise Unfit
    return w.let(f"jnp.bincount({v.name}.reshape(-1).astype(jnp.int32) % 6, length=6)")


@op("unique")
def _unique(w: Writer, v: Value, draw: Draw) -> Value:
    if not v.is_int or not (w.mixes or v.rows is None):
        raise Unfit
    return w.let(f"jnp.unique({v.name} % 16, size=8, fill_value=0)")


@op("histogram")
def _histogram(w: Writer, v: Value, draw: Draw) -> Value:
    if v.dtype != "float32" or not (w.mixes or v.rows is None):
        raise Unfit
    return w.let(f"jnp.histogram(lax.stop_gradient({v.name}), bins=6, range=(-2.0, 2.0))[0]")


def _segment(name: str) -> None:
    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if not v.rank or 0 not in w.axes(v) or v.shape[0] < 3 or v.dtype == "bool":
            raise Unfit
        ids = f"jnp.arange({v.dim(0)}) * 5 % 4"
        x = f"lax.stop_gradient({v.name})" if name == "segment_prod" else v.name
        made = f"jax.ops.{name}({x}, {ids}, num_segments=4)"
        if name in ("segment_max", "segment_min"):
            if not v.is_float:
                raise Unfit
            made = f"jnp.nan_to_num({made}, posinf=0.0, neginf=0.0)"
        return w.let(made, _kept(v, 0))


for _name in ("segment_sum", "segment_max", "segment_min", "segment_prod"):
    _segment(_name)


def _of_batch(name: str, needs: str, write: Callable[[Writer, Value, Draw, Value], Value]) -> None:
    """Enter an op that also reads an array of the batch, row by row."""

    @op(name)
    def emit(w: Writer, v: Value, draw: Draw) -> Value:
        if needs not in w.batch or v.rows is None:
            raise Unfit
        return write(w, v, draw, w.batch[needs])


def _gather_rows(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if v.rows != 0 or v.rank < 2:
        raise Unfit
    index = f'(batch["labels"] % {v.shape[1]})'
    shaped = f"{index}.reshape(-1, {'1, ' * (v.rank - 1)})"
    return w.let(f"jnp.take_along_axis({v.name}, {shaped}, 1)", 0)


def _gather_point(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if v.rows != 0 or v.rank < 2:
        raise Unfit
    index = f'batch["labels"] % {v.shape[1]}'
    made = w.let(f"{v.name}[jnp.arange({v.dim(0)}), {index}]", 0)
    return made


def _scatter_point(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if v.rows != 0 or v.rank < 2 or not v.is_float:
        raise Unfit
    how = draw.one(["set", "add", "max", "multiply"])
    index = f'batch["labels"] % {v.shape[1]}'
    x = f"lax.stop_gradient({v.name})" if how == "multiply" else v.name
    return w.let(f"{x}.at[jnp.arange({v.dim(0)}), {index}].{how}(0.7)", 0)


def _vmapped_update(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if v.rows != 0 or v.rank < 2 or not v.is_float or v.shape[1] < 2:
        raise Unfit
    x = v.name
    return w.let(
        f"jax.vmap(lambda r, i: lax.dynamic_update_slice_in_dim(r, r[:1] * 2, i, 0))"
        f'({x}, batch["labels"] % {v.shape[1]})', 0
    )  # fmt: skip


def _vmapped_slice(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if v.rows != 0 or v.rank < 2 or v.shape[1] < 2:
        raise Unfit
    return w.let(
        f"jax.vmap(lambda r, i: lax.dynamic_slice_in_dim(r, i, {v.shape[1] // 2}))"
        f'({v.name}, batch["labels"] % {v.shape[1]})', 0
    )  # fmt: skip


def _class_means(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if not w.mixes or v.rows != 0 or v.dtype != "float32":
        raise Unfit
    ids = 'batch["labels"] % 5'
    sums = w.let(f"jax.ops.segment_sum({v.name}, {ids}, num_segments=5)")
    return w.let(f"{v.name} - {sums.name}[{ids}] / {v.dim(0)}", 0)


def _sort_rows(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if not w.mixes or v.rows != 0:
        raise Unfit
    return w.let(f'{v.name}[jnp.argsort(batch["labels"], stable=True)]')


def _masked(w: Writer, v: Value, draw: Draw, mask: Value) -> Value:
    if v.rows != 0:
        raise Unfit
    ones = "1, " * (v.rank - 1)
    return w.let(f'jnp.where(batch["mask"].reshape(-1, {ones}), {v.name}, 0)', 0)


def _label_embedding(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if v.rows != 0 or not v.is_float or v.rank < 2:
        raise Unfit
    ones = "1, " * (v.rank - 2)
    table = w.param(8, v.shape[-1], scale=0.5)
    looked = f'{table}[batch["labels"] % 8].reshape(-1, {ones}{v.shape[-1]})'
    return w.let(f"{v.name} + {looked}.astype({v.name}.dtype)", 0)


def _scatter_classes(w: Writer, v: Value, draw: Draw, labels: Value) -> Value:
    if not w.mixes or v.rows != 0 or v.rank != 2 or v.dtype != "float32":
        raise Unfit
    how = draw.one(["add", "max", "min"])
    return w.let(
        f'jnp.zeros((6, {v.shape[1]})).at[batch["labels"] % 6].{how}({v.name})'
    )  # fmt: skip


_of_batch("gather_label", "labels", _gather_rows)
_of_batch("gather_point", "labels", _gather_point)
_of_batch("scatter_point", "labels", _scatter_point)
_of_batch("vmap_dynamic_update_slice", "labels", _vmapped_update)
_of_batch("vmap_dynamic_slice", "labels", _vmapped_slice)
_of_batch("class_means", "labels", _class_means)
_of_batch("sort_rows", "labels", _sort_rows)
_of_batch("row_mask", "mask", _masked)
_of_batch("label_embedding", "labels", _label_embedding)
_of_batch("scatter_classes", "labels", _scatter_classes)
