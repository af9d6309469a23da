"""Steps that call Python on the host, each way that JAX has; what they call writes into a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

ROWS, WIDTH = 16, 8
Step = Callable[[Any, Any], Any]
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Log:
    """What was called, in order: a word and the arrays that came with it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[np.ndarray[Any, Any]]]] = []

    def __call__(self, word: str, *values: Any) -> None:
        self.calls.append((word, [np.array(v) for v in values]))

    def taken(self) -> list[tuple[str, list[np.ndarray[Any, Any]]]]:
        """The calls so far, of which none is kept."""
        jax.effects_barrier()
        found, self.calls = self.calls, []
        return found


def given() -> tuple[Any, Any]:
    """Weights and a batch; the batch is integral, so that no order of sums changes it."""
    w = jnp.eye(WIDTH) * 0.5 + 0.01 * jnp.arange(WIDTH, dtype=jnp.float32)
    return w, np.random.default_rng(0).integers(-3, 4, (ROWS, WIDTH)).astype(np.float32)


def _updated(w: Any, loss: Callable[[Any], Any]) -> tuple[Any, Any]:
    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def scalars(log: Log, ordered: bool) -> Step:
    """Calls on the loss, the update and the batch's sum, none in a loop."""

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(b @ w) - b) ** 2)

        new, value = _updated(w, loss)
        io_callback(lambda v: log("io", v), None, value, ordered=ordered)
        jax.debug.callback(
            lambda v, n: log("debug scalars", v, n), jnp.sum(b), new, ordered=ordered
        )
        io_callback(lambda v: log("last", v), None, jnp.max(new), ordered=ordered)
        return new, value

    return step


def rows(log: Log, ordered: bool) -> Step:
    """Calls on values that hold rows of the batch, first of all the batch itself."""

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any) -> Any:
            out = jnp.tanh(b @ w)
            jax.debug.callback(lambda x: log("debug forward", x), out, ordered=ordered)
            return jnp.mean((out - b) ** 2)

        io_callback(lambda x: log("batch", x), None, b, ordered=ordered)
        new, value = _updated(w, loss)
        io_callback(lambda x: log("after", x), None, (b @ new).T, ordered=ordered)
        return new, value

    return step


def scanned(log: Log, ordered: bool) -> Step:
    """Calls in a scan over layers, forward and in what a checkpoint computes again."""

    def step(w: Any, b: Any) -> Any:
        def layer(x: Any, one: Any) -> Any:
            n, v = one
            x = jnp.tanh(x @ v)
            io_callback(lambda n, v: log("weight", n, v), None, n, v[0], ordered=ordered)
            return x, jnp.sum(x)

        def loss(w: Any) -> Any:
            def body(x: Any, v: Any) -> Any:
                x = jnp.tanh(x @ v)
                jax.debug.callback(lambda x: log("debug layer", x), x, ordered=ordered)
                return x, None

            out, _ = lax.scan(body, b, jnp.stack([w, w * 0.5, w * 2]))
            return jnp.mean((out - b) ** 2)

        new, value = _updated(w, loss)
        _, sums = lax.scan(layer, b, (jnp.arange(3), jnp.stack([new, new * 0.5, new * 2])))
        return new, value, jnp.sum(sums)

    return step


def branches(log: Log, ordered: bool) -> Step:
    """Calls in one branch of two, on a scalar and on rows, and in a branch within a scan."""

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(b @ w) - b) ** 2)

        new, value = _updated(w, loss)

        def loud(v: Any) -> Any:
            io_callback(lambda v: log("loud", v), None, v, ordered=ordered)
            return v + 1

        value = lax.cond(value > 0, loud, lambda v: v - 1, value)
        value = lax.cond(value < 0, loud, lambda v: v - 1, value)
        big = jnp.max(w) > 0.1

        def batch(b: Any) -> Any:
            jax.debug.callback(lambda b: log("debug batch", b), b, ordered=ordered)
            return jnp.sum(b)

        total = lax.cond(big, batch, jnp.sum, b)

        def body(c: Any, n: Any) -> Any:
            lax.cond(
                n % 2 == 0,
                lambda: io_callback(lambda n: log("even", n), None, n, ordered=ordered),
                lambda: None,
            )
            return c + jnp.sum(new), None

        last, _ = lax.scan(body, value, jnp.arange(4))
        return new, value, total, last

    return step


def whiles(log: Log, ordered: bool) -> Step:
    """Calls in a while loop on weights."""

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(b @ w) - b) ** 2)

        new, value = _updated(w, loss)

        def body(carry: Any) -> Any:
            n, v = carry
            io_callback(lambda n, v: log("while", n, v), None, n, v, ordered=ordered)
            return n + 1, v * 0.5

        _, small = lax.while_loop(lambda c: c[1] > 0.1, body, (0, jnp.max(new)))
        return new, value, small

    return step


def results(log: Log, ordered: bool) -> Step:
    """Calls whose results the step uses: floats, booleans, a negative zero, a matrix."""

    def step(w: Any, b: Any) -> Any:
        def scale(n: Any) -> Any:
            log("scale", n)
            return np.float32(n * 0.5), np.asarray([True, False]), np.float32(-0.0)

        kinds = (SCALAR, jax.ShapeDtypeStruct((2,), jnp.bool_), SCALAR)
        half, flags, zero = io_callback(scale, kinds, jnp.max(w), ordered=ordered)

        def pure(w: Any) -> Any:
            log("pure", w)
            return w * 2

        double = jax.pure_callback(pure, jax.ShapeDtypeStruct(w.shape, w.dtype), w)

        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(b @ (w + 0.1 * half * double)) - b) ** 2)

        new, value = _updated(w, loss)
        return new, value, flags, 1 / zero

    return step


def unread(log: Log, ordered: bool) -> Step:
    """Calls that give results which nobody reads."""

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(b @ w) - b) ** 2)

        new, value = _updated(w, loss)

        def count(v: Any) -> Any:
            log("count", v)
            return np.float32(1)

        io_callback(count, SCALAR, value, ordered=ordered)
        io_callback(count, SCALAR, b, ordered=ordered)
        return new, value

    return step


def vmapped(log: Log, ordered: bool) -> Step:
    """Calls for each row of the batch, as `vmap` makes them."""

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any, row: Any) -> Any:
            out = jnp.tanh(row @ w)
            jax.debug.callback(lambda x, v: log("debug row", x, v), out, w[0], ordered=ordered)
            return jnp.mean((out - row) ** 2)

        new, value = _updated(w, lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, b)))
        io_callback(lambda x: log("first rows", x), None, b[:2], ordered=ordered)
        if not ordered:  # JAX has no ordered io_callback under vmap
            jax.vmap(lambda row: io_callback(lambda x: log("row", x), None, row @ new))(b)
        return new, value

    return step


def differentiated(log: Log, ordered: bool) -> Step:
    """Calls within a checkpoint, which makes them twice, and in both rules of a custom_vjp."""

    def step(w: Any, b: Any) -> Any:
        @jax.custom_vjp
        def square(x: Any) -> Any:
            return jnp.sum(x * x)

        def forward(x: Any) -> Any:
            jax.debug.callback(lambda x: log("debug forward", x), x, ordered=ordered)
            return jnp.sum(x * x), x

        def backward(x: Any, given: Any) -> Any:
            jax.debug.callback(lambda g, x: log("debug back", g, x), given, x, ordered=ordered)
            return (2 * given * x,)

        square.defvjp(forward, backward)

        @jax.checkpoint
        def layer(w: Any) -> Any:
            x = jnp.tanh(b @ w)
            jax.debug.callback(lambda s: log("debug layer", s), jnp.sum(x), ordered=ordered)
            return jnp.sin(x)

        return _updated(w, lambda w: jnp.mean(layer(w) ** 2) + 0.01 * square(w))

    return step


def nested(log: Log, ordered: bool) -> Step:
    """Calls in a scan within a scan, which runs backward, and in a branch of a branch."""

    def step(w: Any, b: Any) -> Any:
        new, value = _updated(w, lambda w: jnp.mean((jnp.tanh(b @ w) - b) ** 2))

        def inner(c: Any, n: Any) -> Any:
            def say() -> None:
                io_callback(lambda n, c: log("inner", n, c), None, n, c, ordered=ordered)

            lax.cond(n > 0, lambda: lax.cond(n > 1, say, lambda: None), lambda: None)
            return c + 1, c

        def outer(c: Any, v: Any) -> Any:
            io_callback(lambda v: log("outer", v), None, jnp.sum(v), ordered=ordered)
            c, made = lax.scan(inner, c, jnp.arange(3), reverse=True)
            io_callback(lambda v, m: log("rows", v, m), None, v, made, ordered=ordered)
            return c, jnp.tanh(v)

        last, out = lax.scan(outer, jnp.float32(0), jnp.stack([b, b * 2]))
        return new, value, last, jnp.sum(out)

    return step


def loads(log: Log, ordered: bool) -> Step:
    """A call that gives rows of the batch, made of nothing of it."""

    def step(w: Any, b: Any) -> Any:
        def load() -> Any:
            log("load")
            return np.arange(ROWS, dtype=np.float32) / ROWS

        extra = io_callback(load, jax.ShapeDtypeStruct(b.shape[:1], jnp.float32), ordered=ordered)

        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(b @ w) - b) ** 2 * extra[:, None])

        return _updated(w, loss)

    return step


BANK: dict[str, Callable[[Log, bool], Step]] = {
    f.__name__: f
    for f in (
        scalars,
        rows,
        scanned,
        branches,
        whiles,
        results,
        unread,
        vmapped,
        differentiated,
        nested,
        loads,
    )
}


def check(log: Log, plain: Step, planned: Step, steps: int = 2, ordered: bool = False) -> int:
    """That both call alike for some steps, with the same results; how many calls there were."""
    state, other = given()[0], given()[0]
    batch, count = given()[1], 0
    for _ in range(steps):
        out = plain(state, batch)
        jax.block_until_ready(out)
        expected = log.taken()
        own = planned(other, batch)
        jax.block_until_ready(own)
        found = log.taken()
        jax.tree.map(_equal, own, out)
        _check_calls(found, expected, ordered)
        state, other, count = out[0], own[0], count + len(found)
    return count


def _equal(own: Any, out: Any) -> None:
    np.testing.assert_allclose(np.asarray(own), np.asarray(out), rtol=2e-5, atol=2e-6)


def _check_calls(found: Sequence[Any], expected: Sequence[Any], ordered: bool) -> None:
    # JAX orders debug calls among themselves, and io calls among themselves.
    key = _is_debug if ordered else _by_value
    found, expected = (sorted(calls, key=key) for calls in (found, expected))
    assert [w for w, _ in found] == [w for w, _ in expected]
    for (_, own), (_, out) in zip(found, expected, strict=True):
        assert [a.shape for a in own] == [a.shape for a in out]
        jax.tree.map(_equal, own, out)


def _is_debug(call: Any) -> bool:
    return bool(call[0].startswith("debug"))


def _by_value(call: Any) -> Any:
    word, values = call
    return word, [np.round(np.asarray(v, np.float64), 3).ravel().tolist() for v in values[:1]]
