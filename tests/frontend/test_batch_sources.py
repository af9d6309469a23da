"""What a step makes of rows by itself is, in each microbatch, its rows of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.errors import BatchError
from autopar.frontend.microbatch.batch_inputs import BatchAxes
from autopar.ir.batching import Rows
from tests.frontend.evaluating import (
    check_sources,
    cut,
    evaluate,
    inputs_of,
    rows_together,
    same_graphs,
)
from tests.frontend.tracing import shape

Draw = Callable[[Any, jax.Array], Any]

B, WIDTH = 8, 5
X = np.random.default_rng(0).standard_normal((B, WIDTH)).astype(np.float32)
DRAWS: dict[str, Draw] = {
    "uniform": lambda key, x: x + jax.random.uniform(key, x.shape),
    "normal": lambda key, x: x * jax.random.normal(key, x.shape),
    "half": lambda key, x: x.astype(jnp.float16) + jax.random.normal(key, x.shape, jnp.float16),
    "bernoulli": lambda key, x: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0),
    "mask of rows": lambda key, x: x * jax.random.bernoulli(key, 0.5, (x.shape[0], 1)),
    "categorical": lambda key, x: jax.random.categorical(key, x),
    "randint": lambda key, x: jax.random.randint(key, (len(x), 3), 0, 99, jnp.int8),
    "8 bits": lambda key, x: jax.random.bits(key, (len(x), 7), "uint8"),
    "16 bits": lambda key, x: jax.random.bits(key, (len(x), 2, 2), "uint16"),
    "32 bits": lambda key, x: jax.random.bits(key, (len(x),)),
    "two keys": lambda key, x: jax.vmap(lambda k: jax.random.normal(k, x.shape), out_axes=1)(
        jax.random.split(key)
    ),
    "a key a row": lambda key, x: jax.vmap(lambda k, r: r * jax.random.uniform(k))(
        jax.random.split(key, len(x)), x
    ),
    "folded": lambda key, x: jax.vmap(
        lambda i, r: jax.random.normal(jax.random.fold_in(key, i), r.shape)
    )(jnp.arange(len(x)), x),
    "merged": lambda key, x: jax.random.bits(key, (x.size,)).reshape(x.shape),
    "turned": lambda key, x: jax.random.bits(key, (x.size,)).reshape(WIDTH, -1).T,
    "inside": lambda key, x: jax.random.bits(key, (3, len(x), 2)).transpose(1, 0, 2),
    "in a scan": lambda key, x: lax.scan(
        lambda h, k: (h * jax.random.bernoulli(k, 0.5, h.shape), None),
        x,
        jax.random.split(key, 3),
    )[0],
    "in a branch": lambda key, x: lax.cond(
        jax.random.uniform(key) < 2.0, lambda: x + jax.random.normal(key, x.shape), lambda: x
    ),
    "in a loop": lambda key, x: lax.fori_loop(
        0, 3, lambda i, h: h + jax.random.normal(jax.random.fold_in(key, i), h.shape), x
    ),
    "while": lambda key, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + jax.random.uniform(key, x.shape)), (0, x)
    )[1],
    "checkpointed": lambda key, x: jax.checkpoint(lambda h: h * jax.random.uniform(key, h.shape))(
        x
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_microbatch_draws_its_rows_of_the_whole_draw(name: str) -> None:
    _check_draw(DRAWS[name], jax.random.key(3), (2, 8))


@pytest.mark.parametrize("name", ["uniform", "a key a row", "in a scan"])
def test_raw_keys_draw_alike(name: str) -> None:
    _check_draw(DRAWS[name], jax.random.PRNGKey(3), (4,))


def _check_draw(draw: Draw, key: jax.Array, counts: Sequence[int]) -> None:
    want = np.asarray(jax.jit(draw)(key, X))
    for count in counts:
        step = cut(draw, (key, X), count)
        assert step.index
        np.testing.assert_array_equal(rows_together(step, (key, X))[0], want)
        assert same_graphs(step.whole, step.part)


def test_bits_of_64() -> None:
    def draw(key: Any, x: jax.Array) -> jax.Array:
        return jax.random.bits(key, (len(x), 3), "uint64")

    with jax.enable_x64(True):
        args = jax.random.key(1), X
        np.testing.assert_array_equal(
            rows_together(cut(draw, args, 4), args)[0], np.asarray(jax.jit(draw)(*args))
        )


KEY = jax.random.key(0)
TABLE = np.arange(24.0, dtype=np.float32).reshape(12, 2)
OTHER: dict[str, Callable[..., Any]] = {
    "numbered": lambda x: x + jnp.arange(len(x), dtype=jnp.float32)[:, None],
    "floats": lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "across": lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 1),
    "merged": lambda x: jnp.arange(x.size).reshape(x.shape),
    "turned": lambda x: jnp.arange(x.size).reshape(WIDTH, -1).T,
    "spaced": lambda x: jnp.linspace(0.0, 1.0, len(x) + 0 * x.shape[1], endpoint=False),
    "a table": lambda x: x[:, :2] + jnp.asarray(TABLE)[: len(x)],
    "closed over": lambda x: x * np.arange(len(x), dtype=np.float32)[:, None],
    "closed over in a scan": lambda x: lax.scan(
        lambda h, _: (h * 2 + np.arange(len(x), dtype=np.float32)[:, None], None), x, None, length=2
    )[0],
    "own place": lambda x: x[jnp.arange(len(x)), jnp.argmax(x, 1)],
    "negative places": lambda x: x[jnp.arange(len(x)), jnp.argmax(x, 1) - WIDTH],
    "alike": lambda x: x + jnp.ones((len(x), 1)) * jnp.full((len(x), WIDTH), 2.0),
    "generated": lambda x: x + jax.random.uniform(jax.random.key(7, impl="rbg"), x.shape),
    "generated unsafely": lambda x: (
        jax.random.bits(jax.random.key(7, impl="unsafe_rbg"), (3, len(x))).T
    ),
}


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER)
def test_each_microbatch_makes_its_rows_of_what_the_whole_makes(make: Callable[..., Any]) -> None:
    want = np.asarray(jax.jit(make)(X))
    for count in (2, 8):
        step = cut(make, (X,), count)
        np.testing.assert_array_equal(rows_together(step, (X,))[0], want)
        check_sources(step, (X,))
        assert same_graphs(step.whole, step.part)


def test_time_major_rows_are_strided_where_dims_are_merged() -> None:
    def draw(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, 2)
        return (flat * jax.random.uniform(KEY, flat.shape)).reshape(x.shape)

    x = np.random.default_rng(1).standard_normal((3, B, 2)).astype(np.float32)
    axes: BatchAxes = {"x": 1}
    step = cut(draw, (x,), 4, axes)
    assert Rows(0, 3, 1) in [rows for _, rows in step.sources]
    np.testing.assert_array_equal(
        rows_together(step, (x,), axes, 1)[0], np.asarray(draw(jnp.asarray(x)))
    )


def test_what_is_made_of_the_batch_is_no_source() -> None:
    def spread(x: jax.Array) -> Any:
        total = x.sum(0)
        return jnp.pad(total, (0, len(x) - WIDTH)), jnp.pad(jnp.ones(WIDTH), (0, len(x) - WIDTH))

    step = cut(spread, (shape(16, WIDTH),), 2)
    assert [name for name, _ in step.sources] == [str(step.whole.graph.outputs[1])]


def test_what_needs_no_number_gets_none() -> None:
    step = cut(lambda x: x + jnp.zeros(x.shape), (X,), 2)
    assert step.index == ""
    assert [i.path for i in step.part.graph.inputs] == ["x"]


def test_the_number_stands_before_the_constants() -> None:
    table = np.ones((WIDTH,), np.float32)
    step = cut(lambda x: x * table + jnp.arange(len(x))[:, None], (X,), 2)
    assert [i.path for i in step.part.graph.inputs] == ["x", "microbatch", "const/0"]
    assert step.part.graph.inputs[1].value.name == step.index


def test_the_whole_is_what_was_traced() -> None:
    draw = DRAWS["in a scan"]
    step = cut(draw, (KEY, X), 4)
    made = evaluate(step.whole.program, inputs_of(step, (KEY, X), -1))[0]
    np.testing.assert_array_equal(made, jax.jit(draw)(KEY, X))


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (
            lambda key, x: x * jax.random.gamma(key, 2.0, x.shape),
            "random_gamma at test_batch_sources.py",
        ),
        (lambda key, x: jnp.eye(len(x)) @ x, "iota at test_batch_sources.py"),
        (lambda key, x: x[1:] + jnp.arange(len(x) - 1)[:, None], "iota at test_batch_sources.py"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_line(draw: Draw, named: str) -> None:
    with pytest.raises(BatchError, match=named):
        cut(draw, (KEY, shape(B, B)), 4)


def test_a_large_draw_of_another_generator_is_refused() -> None:
    def draw(x: jax.Array) -> jax.Array:
        return x * jax.random.uniform(jax.random.key(7, impl="rbg"), x.shape)

    with pytest.raises(BatchError, match=r"random_bits at .*u32\[1024,65536\].*\n.*threefry keys"):
        cut(draw, (shape(1024, 65536),), 4)
