"""What a loop adds up is right and is combined once: in every form in which people write sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.hlo.collectives import read_collectives
from tests.end_to_end.running import EAGER

Tree = Any
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]
ROWS, WIDTH, TRIPS = 64, 16, 4


def _loss(w: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ w["a"] + w["c"]) @ w["b"] - x) ** 2)


def _weights() -> Tree:
    rng = np.random.default_rng(0)
    shapes = {"a": (WIDTH, 32), "b": (32, WIDTH), "c": (32,)}
    return {n: jnp.asarray(0.3 * rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}


def _norm(g: Tree) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(g)))


def _updated(w: Tree, g: Tree) -> Tree:
    """SGD on gradients that are clipped by their norm, which is no linear function of them."""
    return jax.tree.map(lambda a, b: a - 0.1 * b / jnp.maximum(_norm(g), 0.1), w, g)


def _zeros(w: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, w)


def _added(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def scanned(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    def body(acc: Tree, m: jax.Array) -> tuple[Tree, None]:
        return _added(acc, jax.value_and_grad(_loss)(w, m)), None

    (loss, g), _ = lax.scan(body, (0.0, _zeros(w)), x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), loss


def strided(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    return scanned(w, x.reshape(-1, TRIPS, WIDTH).swapaxes(0, 1))


def sliced(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    size = ROWS // TRIPS

    def body(i: jax.Array, acc: Tree) -> Tree:
        rows = lax.dynamic_slice_in_dim(x, i * size, size)
        return _added(acc, jax.value_and_grad(_loss)(w, rows))

    loss, g = lax.fori_loop(0, TRIPS, body, (jnp.float32(0), _zeros(w)))
    return _updated(w, g), loss


def looked_up(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """Rows in a random order, as in the epochs of PPO."""
    order = jax.random.permutation(jax.random.key(3), ROWS)
    return scanned(w, x[order])


def counted(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """A while loop that carries a sum and how many rows are in it."""
    parts = x.reshape(TRIPS, -1, WIDTH)

    def body(carry: Tree) -> Tree:
        i, rows, g = carry
        return i + 1, rows + parts[i].shape[0], _added(g, jax.grad(_loss)(w, parts[i]))

    start = (0, 0, _zeros(w))
    _, rows, g = lax.while_loop(lambda c: c[1] < ROWS, body, start)
    return _updated(w, jax.tree.map(lambda leaf: leaf / rows, g)), rows


def nested(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    def outer(acc: Tree, part: jax.Array) -> tuple[Tree, jax.Array]:
        def inner(acc: Tree, m: jax.Array) -> tuple[Tree, jax.Array]:
            loss, g = jax.value_and_grad(_loss)(w, m)
            return _added(acc, g), loss

        return lax.scan(inner, acc, part)

    g, losses = lax.scan(outer, _zeros(w), x.reshape(2, 2, -1, WIDTH))
    return _updated(w, g), losses


def mapped(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    def loss(w: Tree) -> tuple[jax.Array, jax.Array]:
        losses = lax.map(lambda m: _loss(w, m), x.reshape(TRIPS, -1, WIDTH))
        return jnp.sum(losses**2), losses

    g, losses = jax.grad(loss, has_aux=True)(w)
    return _updated(w, g), losses


def moving(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """A moving average is linear in what goes into it."""

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, None]:
        g = jax.grad(_loss)(w, m)
        return jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, acc, g), None

    g, _ = lax.scan(body, w, x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), _norm(g)


def compensated(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """Kahan's sum: what was lost is carried beside it."""

    def add(total: jax.Array, lost: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = g - lost
        fresh = total + y
        return fresh, (fresh - total) - y

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, None]:
        g = jax.grad(_loss)(w, m)
        both = jax.tree.map(add, *acc, g)
        return jax.tree.transpose(jax.tree.structure(w), jax.tree.structure((0, 0)), both), None

    (g, _), _ = lax.scan(body, (_zeros(w), _zeros(w)), x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), _norm(g)


def largest(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """No sum at all: the largest gradient and loss of any part."""

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(jnp.maximum, acc, jax.value_and_grad(_loss)(w, m)), None

    (loss, g), _ = lax.scan(body, (0.0, _zeros(w)), x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), loss


def from_one(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """Sums that do not start from zero, literals and arrays."""

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, None]:
        return _added(acc, jax.value_and_grad(_loss)(w, m)), None

    start = (1.0, jax.tree.map(jnp.ones_like, w))
    (loss, g), _ = lax.scan(body, start, x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), loss


def read_inside(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """A sum that every trip reads as it stands, by what is not linear."""

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, jax.Array]:
        g = jax.grad(_loss)(_updated(w, acc), m)
        return _added(acc, g), _norm(acc)

    g, norms = lax.scan(body, _zeros(w), x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), norms


def picked(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """Parts that a cond leaves out, or answers with a constant."""

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, None]:
        total, last, g = acc
        loss, fresh = jax.value_and_grad(_loss)(w, m)
        good = loss > 0.1
        g = lax.cond(good, _added, lambda a, b: a, g, fresh)
        last = lax.cond(good, lambda v: v, lambda v: 1.0, loss)
        return (total + last, last, g), None

    (loss, last, g), _ = lax.scan(body, (0.0, 0.0, _zeros(w)), x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), (loss, last)


def forgotten(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """A carry that every trip sets to a constant, though it starts as a sum."""

    def body(acc: Tree, m: jax.Array) -> tuple[Tree, jax.Array]:
        return (1.0, _added(acc[1], jax.grad(_loss)(w, m))), acc[0] * 2.0

    start = (_loss(w, x), _zeros(w))
    (one, g), seen = lax.scan(body, start, x.reshape(TRIPS, -1, WIDTH))
    return _updated(w, g), (one, seen)


def repeated(w: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    """Gradients of weights that a recurrence reads in every trip, its trips made again."""

    def loss(w: Tree) -> jax.Array:
        def cell(h: jax.Array, xt: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h + jnp.tanh((xt + h) @ w["a"] + w["c"]) @ w["b"]), None

        steps = jnp.moveaxis(x.reshape(ROWS // 4, 4, WIDTH), 1, 0)
        h, _ = lax.scan(jax.checkpoint(cell), jnp.zeros((ROWS // 4, WIDTH)), steps)
        return jnp.mean(h**2)

    value, g = jax.value_and_grad(loss)(w)
    return _updated(w, g), value


STEPS: dict[str, Step] = {
    f.__name__: f
    for f in (
        scanned, strided, sliced, looked_up, counted, nested, mapped, moving, compensated, largest,
        from_one, read_inside, picked, forgotten, repeated,
    )
}  # fmt: skip


def _rows(number: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).standard_normal((ROWS, WIDTH)), jnp.float32)


def _run(step: Callable[..., Any]) -> list[np.ndarray[Any, Any]]:
    """The last of three states, and everything that the steps returned beside."""
    w, seen = _weights(), []
    for number in range(3):
        w, beside = step(w, _rows(number))
        seen.append(beside)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((w, seen))]


@functools.cache
def _plain(name: str) -> list[np.ndarray[Any, Any]]:
    return _run(jax.jit(STEPS[name]))


@functools.cache
def _parallel(name: str, method: str, mesh: tuple[int, ...]) -> Any:
    """The step, which is compiled when it first runs and not again."""
    return autopar.parallelize(STEPS[name], cluster=EAGER, mesh=mesh, method=method, donate=False)


WAYS = [
    ("dp", (8,)),
    pytest.param("auto", (2, 4), marks=pytest.mark.ci),
    pytest.param("fsdp", (8,), marks=pytest.mark.slow),
    pytest.param("auto", (8,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "mesh"), WAYS, ids=lambda given: str(given).replace(" ", ""))
@pytest.mark.parametrize("name", STEPS)
def test_a_sum_equals_that_of_plain_jit(name: str, method: str, mesh: tuple[int, ...]) -> None:
    for mine, plain in zip(_run(_parallel(name, method, mesh)), _plain(name), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=2e-5, atol=2e-6)


SUMMED = (
    "scanned", "strided", "sliced", "looked_up", "counted", "nested", "mapped", "moving",
    "repeated",
)  # fmt: skip


@pytest.mark.parametrize("name", SUMMED)
def test_gradients_are_combined_once_and_not_in_every_trip(name: str) -> None:
    """As compiled; rows that are parted are on all devices, as no other sum would be partial."""
    step = _parallel(name, "dp", (8,))
    compiled = step.compile(_weights(), _rows(0))
    found = [c for c in read_collectives(compiled.as_text()) if c.kind == "all-reduce"]
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(_weights()))
    assert {c.trips for c in found} == {1}
    assert whole <= sum(c.total_bytes for c in found) <= whole + 64  # with losses and counts
    assert step.plan.prediction.traffic[0].nbytes == sum(c.total_bytes for c in found)
