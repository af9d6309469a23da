"""Fewer heads of keys and values than devices: tensor parallel recipes plan them and stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

Tree = Any
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
BATCH, LENGTH, WIDTH, HEADS, HEAD = 4, 8, 32, 8, 8


def _softmax(q: jax.Array, k: jax.Array, form: str) -> jax.Array:
    return jax.nn.softmax(jnp.einsum(form, q, k) * HEAD**-0.5, axis=-1)


def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (k, v))
    return jnp.einsum("bhqk,bkhd->bqhd", _softmax(q, k, "bqhd,bkhd->bhqk"), v)


def broadcast(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    def spread(x: jax.Array) -> jax.Array:
        b, t, n, d = x.shape
        return jnp.broadcast_to(x[:, :, :, None], (b, t, n, HEADS // n, d)).reshape(q.shape)

    k, v = spread(k), spread(v)
    return jnp.einsum("bhqk,bkhd->bqhd", _softmax(q, k, "bqhd,bkhd->bhqk"), v)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    parts = q.reshape(*q.shape[:2], k.shape[2], -1, HEAD)
    weights = _softmax(parts, k, "bqngd,bknd->bngqk")
    return jnp.einsum("bngqk,bknd->bqngd", weights, v).reshape(q.shape)


def library(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v)


def single(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = _softmax(q, k[:, :, 0], "bqhd,bkd->bhqk")
    return jnp.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])


def _step(attend: Attention, kv_heads: int) -> Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]:
    def loss(w: Tree, x: jax.Array) -> jax.Array:
        q = (x @ w["q"]).reshape(*x.shape[:2], HEADS, HEAD)
        k, v = ((x @ w[n]).reshape(*x.shape[:2], kv_heads, HEAD) for n in "kv")
        x = x + attend(q, k, v).reshape(*x.shape[:2], -1) @ w["o"]
        return jnp.mean((jnp.tanh(x @ w["u"]) @ w["d"]) ** 2)

    def step(w: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        value, g = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, b: a - 0.5 * b, w, g), value

    return step


def _weights(kv_heads: int) -> Tree:
    rng = np.random.default_rng(0)
    shapes = {
        "q": (WIDTH, HEADS * HEAD), "k": (WIDTH, kv_heads * HEAD), "v": (WIDTH, kv_heads * HEAD),
        "o": (HEADS * HEAD, WIDTH), "u": (WIDTH, 64), "d": (64, WIDTH),
    }  # fmt: skip
    return {n: jnp.asarray(0.2 * rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}


def _run(step: Callable[..., Any], kv_heads: int) -> list[np.ndarray[Any, Any]]:
    w, seen = _weights(kv_heads), []
    for number in range(3):
        rng = np.random.default_rng(number)
        rows = jnp.asarray(rng.standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32)
        w, loss = step(w, rows)
        seen.append(loss)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((w, seen))]


@pytest.mark.parametrize(
    ("attend", "kv_heads", "mesh", "method"),
    [
        pytest.param(repeated, 2, (2, 4), "megatron", marks=pytest.mark.ci),
        (broadcast, 2, (1, 8), "megatron"),
        pytest.param(grouped, 2, (2, 4), "megatron", marks=pytest.mark.ci),
        pytest.param(grouped, 2, (8,), "megatron", marks=pytest.mark.ci),
        (grouped, 2, (2, 4), "sequence"),
        pytest.param(grouped, 2, (2, 4), "fsdp+tp", marks=pytest.mark.ci),
        (grouped, 1, (2, 4), "megatron"),
        (library, 2, (2, 4), "megatron"),
        (library, 2, (1, 8), "fsdp+tp"),
        (single, 1, (8,), "megatron"),
    ],
)
def test_few_heads_of_keys_equal_plain_jit(
    attend: Attention, kv_heads: int, mesh: tuple[int, ...], method: str
) -> None:
    step = _step(attend, kv_heads)
    parallel: Any = autopar.parallelize(
        step, cluster="8xcpu", mesh=mesh, method=method, donate=False
    )
    for mine, plain in zip(_run(parallel, kv_heads), _run(jax.jit(step), kv_heads), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=2e-5, atol=2e-6)
    split = {a.path for a in parallel.plan.arguments if any(a.sharding.dims)}
    assert split >= {"w/q", "w/o", "w/u", "w/d"}
