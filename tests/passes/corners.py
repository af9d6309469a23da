"""Small steps, each with one thing in it that a planner may get wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Corner = tuple[Callable[..., Any], tuple[Any, ...]]


def floats(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers of a shape."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32))


def ints(*shape: int, below: int = 8) -> jax.Array:
    """Random whole numbers of a shape."""
    return jnp.asarray(np.random.default_rng(shape).integers(below, size=shape, dtype=np.int32))


def mlp_decay(w: Any, x: jax.Array) -> Any:
    """A weight is read forward, backward and in the update."""

    def loss(w: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * (g + 0.01 * p), w, grads), value


def remat_literals(w: jax.Array, x: jax.Array) -> Any:
    """A remat body returns a constant and one of its inputs."""

    @jax.checkpoint
    def body(w: jax.Array, x: jax.Array) -> Any:
        return jnp.sin(x @ w), 1.0, x

    def loss(w: jax.Array) -> jax.Array:
        y, one, same = body(w, x)
        return jnp.sum(y * one) + jnp.sum(same)

    return w - jax.grad(loss)(w), loss(w)


def scan_literal(x: jax.Array) -> Any:
    """Carries start as literals and zeros; one is returned untouched."""

    def body(carry: Any, row: jax.Array) -> Any:
        total, rows, still = carry
        return (total + row.sum(), rows + row, still), (row * 2.0, total)

    return lax.scan(body, (0.0, jnp.zeros(8), 3), x)


def scan_of_scan(x: jax.Array, w: jax.Array) -> Any:
    """The carry of a scan starts another."""

    def body(h: jax.Array, row: jax.Array) -> Any:
        h = jnp.tanh(h @ w + row)
        return h, h.sum()

    h, first = lax.scan(body, jnp.ones((8,)), x)
    h, second = lax.scan(body, h, x[::-1], reverse=True)
    return h, first, second


def nested_scans(x: jax.Array, w: jax.Array) -> Any:
    """A scan in a scan, with no scanned input inside, and its gradient."""

    def loss(w: jax.Array) -> jax.Array:
        def inner(h: jax.Array, _: None) -> Any:
            return jnp.tanh(h @ w), None

        def outer(h: jax.Array, row: jax.Array) -> Any:
            h, _ = lax.scan(inner, h + row, None, length=2)
            return h, h * 2

        h, ys = lax.scan(outer, jnp.zeros((4, 8)), x)
        return jnp.sum(h) + jnp.sum(ys)

    return jax.value_and_grad(loss)(w)


def while_batch(x: jax.Array, n: jax.Array) -> Any:
    """A while loop carries the batch and closes over arrays in test and body."""

    def test(carry: Any) -> jax.Array:
        i, h = carry
        return (i < n) & (h.max() < 1e6)

    def body(carry: Any) -> Any:
        i, h = carry
        return i + 1, h * 1.5 + x

    return lax.while_loop(test, body, (0, x))


def cond_constants(x: jax.Array, flag: jax.Array) -> Any:
    """Branches return constants, zeros and their input."""
    one = lax.cond(flag, lambda v: (v, 1.0), lambda v: (jnp.zeros_like(v), 2.0), x)
    return one, lax.switch(2, [lambda v: v, lambda v: v * 2, lambda v: v @ v.T @ v], x)


def returned_twice(state: jax.Array, x: jax.Array) -> Any:
    """The new state is an output of its own as well."""
    new = state + x.sum(0)
    return new, {"again": new, "twice": new * 2, "old": state, "batch": x}


def swapped(state: Any, x: jax.Array) -> Any:
    """State comes back with its parts exchanged, one of them untouched."""
    a, b, c = state
    return (b, a + x @ b, c), x.sum()


def empty_arrays(x: jax.Array, none: jax.Array) -> Any:
    """Arrays of no items, and sums over them."""
    return none * 2, none.sum(), jnp.concatenate([x, none]), none.T @ none, x[:0] @ x[:0].T


def scalars(count: jax.Array, rate: jax.Array, x: jax.Array) -> Any:
    """Scalars come in, are counted up, and scale."""
    return count + 1, rate * 0.5, x * rate + count


def several_results(x: jax.Array, y: jax.Array) -> Any:
    """Ops of more than one result."""
    parts = jnp.split(x, 2, axis=1)
    return lax.top_k(x, 3), lax.sort((x, y), num_keys=1), parts, jnp.linalg.qr(x[:8])


def int_bool_sums(x: jax.Array, n: jax.Array) -> Any:
    """Reductions of whole numbers and truth values, which are no floating sums."""
    big = n > 3
    return (
        n.sum(0),
        big.any(1),
        big.all(),
        big.sum(1),
        jnp.argmax(x, 1),
        n.max(0),
        n.min(),
        n.prod(1),
    )


def partial_joins(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """Partial sums meet sums, biases, scales, masks, transposes, casts and non-linear ops."""
    left, right = x @ a, x @ b
    both = left - right * 2.0 + c
    turned = (both.T.reshape(2, 4, 16) * 0.5).astype(jnp.bfloat16).astype(jnp.float32)
    chosen = jnp.where(left > 0, left, right)
    return both, turned, chosen, -left / 3.0, left * right, (left * 4).astype(jnp.int32), abs(left)


def partial_carry(x: jax.Array, w: jax.Array) -> Any:
    """Gradients accumulate in a carry, where they may stay partial sums."""

    def body(total: Any, rows: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(rows @ w) ** 2))(w)
        return (total[0] + grad, total[1] + value), value

    (grad, loss), values = lax.scan(body, (jnp.zeros_like(w), 0.0), x)
    return w - 0.1 * grad, loss, values


def reshapes(x: jax.Array) -> Any:
    """Dims merge, split, turn and repeat."""
    merged = x.reshape(32, 4)
    turned = x.reshape(8, 4, 4).transpose(1, 0, 2).reshape(4, 32)
    return (
        merged @ turned,
        jnp.repeat(x, 2, 0),
        jnp.tile(x, (2, 1)),
        x[None, :, None],
        x.ravel().sum(),
    )


def windows(x: jax.Array, k: jax.Array) -> Any:
    """Convolution, pooling, running sums, padding and reversal."""
    image = x.reshape(2, 8, 8, 1)
    dims = ("NHWC", "HWIO", "NHWC")
    conv = lax.conv_general_dilated(image, k, (1, 1), "SAME", dimension_numbers=dims)
    pool = lax.reduce_window(conv, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return conv, pool, jnp.cumsum(x, 0), jnp.cumsum(x, 1), jnp.pad(x, ((1, 0), (0, 2))), x[::-1, 1:]


def indexing(x: jax.Array, i: jax.Array) -> Any:
    """Gathers, scatters and slices at traced places, with their gradients."""
    at = i[0, 0]
    picked = jnp.take_along_axis(x, i, axis=1)
    cut = lax.dynamic_slice_in_dim(x, at, 2, axis=0)
    put = lax.dynamic_update_slice_in_dim(x, cut * 2, at + 1, axis=0)
    added = jnp.zeros((8, 8)).at[i[:, 0]].add(x[:, :8])
    grad = jax.grad(lambda t: jnp.sum(jnp.sin(t[i[:, 0]] @ x[:8])))(x[:, :8])
    return picked, cut, put, added, grad, x[i[:, 0]], x.at[3].set(1.0), jax.nn.one_hot(i[:, 0], 8)


def softmax_stats(x: jax.Array) -> Any:
    """Maxima and sums over a dim that may be split, with infinities about."""
    masked = jnp.where(x > 0, x, -jnp.inf)
    return jax.nn.softmax(masked, 1), jax.nn.logsumexp(x, 0), x.max(1) - x.min(1), x.std(0)


def keys(key: jax.Array, x: jax.Array) -> Any:
    """Typed keys are split, carried and used."""
    key, one, two = jax.random.split(key, 3)
    drop = jax.random.bernoulli(one, 0.5, x.shape)
    many = jax.vmap(lambda k, row: row + jax.random.normal(k, row.shape))(
        jax.random.split(two, x.shape[0]), x
    )
    return key, jnp.where(drop, x, 0.0), many


def closed_over(x: jax.Array) -> Any:
    """Arrays that the step closes over, and outputs that are constants."""
    table = jnp.asarray(np.arange(128, dtype=np.float32).reshape(16, 8))
    return x @ table.T[:, :8], table, 1.0, jnp.arange(8) + 1, jnp.zeros((4, 4))


def einsums(q: jax.Array, k: jax.Array) -> Any:
    """Batched products, one of them summed over two dims, and bfloat16."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    both = jnp.einsum("bqhd,bqhe->de", q, k)
    low = jnp.einsum("bqhd,bkhd->bqk", q.astype(jnp.bfloat16), k.astype(jnp.bfloat16))
    return jax.nn.softmax(scores), both, low.astype(jnp.float32) > 1e9


def remat_scan(w: jax.Array, x: jax.Array) -> Any:
    """Layers in a scan over stacked weights, recomputed in the backward pass."""

    def loss(w: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h, m: (h + jnp.tanh(h @ m), None))
        return jnp.mean(lax.scan(layer, x, w)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return w - 0.1 * grads, value


def aliases_out(w: jax.Array, x: jax.Array) -> Any:
    """One value is state, loop constant, carry start and output at once."""
    y = x @ w
    h, ys = lax.scan(lambda h, r: (h + y * r, h.sum()), y, jnp.arange(3.0))
    z = lax.fori_loop(0, 3, lambda i, v: v + y[i], y)
    return w, h, ys, z, y


def accumulated(w: jax.Array, x: jax.Array) -> Any:
    """The batch is cut into four by hand, and gradients of the parts are added up."""

    def body(total: jax.Array, part: jax.Array) -> Any:
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w) ** 2))(w), None

    grad, _ = lax.scan(body, jnp.zeros_like(w), x.reshape(4, -1, x.shape[1]))
    return w - 0.1 * grad


def written_once(x: jax.Array, at: jax.Array) -> Any:
    """Single writes, in bounds and out: XLA makes slices of them, and once joined these wrongly."""
    far = x.at[at + 100].set(2.0, mode="drop")
    return x.at[3].set(1.0), x.at[at, 5].add(1.0), far, x.at[:, at].mul(2.0), x.at[-1].max(0.5)


CORNERS: Mapping[str, Corner] = {
    "mlp_decay": (mlp_decay, ({"a": floats(8, 16), "b": floats(16, 8)}, floats(16, 8))),
    "remat_literals": (remat_literals, (floats(8, 16), floats(16, 8))),
    "scan_literal": (scan_literal, (floats(4, 8),)),
    "scan_of_scan": (scan_of_scan, (floats(8, 8), floats(8, 8, seed=1))),
    "nested_scans": (nested_scans, (floats(4, 4, 8), floats(8, 8))),
    "while_batch": (while_batch, (floats(16, 8), jnp.asarray(4))),
    "cond_constants": (cond_constants, (floats(8, 8), jnp.asarray(True))),
    "returned_twice": (returned_twice, (floats(8), floats(16, 8))),
    "swapped": (swapped, ((floats(8, 8), floats(8, 8, seed=1), floats(8)), floats(8, 8, seed=2))),
    "empty_arrays": (empty_arrays, (floats(8, 8), floats(0, 8))),
    "scalars": (scalars, (jnp.asarray(3), jnp.asarray(0.5), floats(8, 8))),
    "several_results": (several_results, (floats(16, 8), floats(16, 8, seed=1))),
    "int_bool_sums": (int_bool_sums, (floats(16, 8), ints(16, 8))),
    "partial_joins": (
        partial_joins,
        (floats(16, 8), floats(8, 8), floats(8, 8, seed=1), floats(8)),
    ),
    "partial_carry": (partial_carry, (floats(4, 8, 8), floats(8, 16))),
    "reshapes": (reshapes, (floats(8, 16),)),
    "windows": (windows, (floats(16, 8), floats(3, 3, 1, 8))),
    "indexing": (indexing, (floats(16, 16), ints(16, 4))),
    "softmax_stats": (softmax_stats, (floats(16, 8),)),
    "keys": (keys, (jax.random.key(0), floats(8, 8))),
    "closed_over": (closed_over, (floats(16, 8),)),
    "einsums": (einsums, (floats(4, 8, 2, 3), floats(4, 8, 2, 3, seed=1))),
    "remat_scan": (remat_scan, (floats(4, 8, 8), floats(8, 8))),
    "accumulated": (accumulated, (floats(8, 8), floats(16, 8))),
    "written_once": (written_once, (floats(16, 16), jnp.asarray(6))),
    "aliases_out": (aliases_out, (floats(8, 8), floats(8, 8, seed=1))),
}
