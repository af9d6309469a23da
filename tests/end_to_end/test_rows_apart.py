"""Steps whose rows loop, solve and sum each in its own way leave the state of plain jit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.errors import BatchError, BatchStatisticError
from tests.end_to_end.running import EAGER
from tests.rules.cases_kernels import NUMBERED

STEPS, ROWS, WIDTH = 3, 16, 8
Loss = Callable[[Any, Any], Any]


def descent(loss: Loss, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A train step."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, moments = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    return step


def root(c: jax.Array) -> jax.Array:
    """A root of y^3 + y = c by Newton's method, and its derivative by the implicit function."""

    def f(y: jax.Array) -> jax.Array:
        return y**3 + y - c

    def solve(f: Any, y: jax.Array) -> Any:
        return lax.while_loop(
            lambda y: jnp.abs(f(y)) > 1e-5, lambda y: y - f(y) / (3 * y * y + 1), y
        )

    return lax.custom_root(f, c, solve, lambda g, y: y / g(1.0))


def roots(w: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(root)(x @ w["a"]) ** 2)


def solves(w: Any, x: Any) -> Any:
    """A system for each row."""

    def row(c: jax.Array) -> jax.Array:
        a = jnp.outer(w["a"], w["a"]) + jnp.outer(c, c) + jnp.eye(WIDTH)
        return jnp.linalg.solve(a, c).sum() + jnp.linalg.slogdet(a)[1]

    return jnp.mean(jax.vmap(row)(x))


def conjugate(w: Any, x: Any) -> Any:
    """A system for each row, by as many steps of conjugate gradients as it needs."""

    def row(c: jax.Array) -> jax.Array:
        a = jnp.outer(w["a"], w["a"]) * 0.1 + jnp.diag(1 + jnp.abs(c))
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, c, tol=1e-6, maxiter=20)[0].sum()

    return jnp.mean(jax.vmap(row)(x))


def searches(w: Any, x: Any) -> Any:
    """A loop of as many trips as each row says, within a scan, beside what is learnt."""

    def row(c: jax.Array) -> jax.Array:
        def level(h: jax.Array, _: None) -> Any:
            h, trips = lax.while_loop(
                lambda s: s[0].sum() < 4, lambda s: (s[0] + 0.7, s[1] + 1), (h * 0.5, 0)
            )
            return h, trips * 1.0

        h, trips = lax.scan(level, lax.stop_gradient(c * w["a"]), None, length=2)
        return (c @ w["a"] - h.sum() - trips.sum()) ** 2

    return jnp.mean(jax.vmap(row)(x))


def normalized(w: Any, x: Any) -> Any:
    """BatchNorm by the mean over a dim that vmap named."""

    def row(c: jax.Array) -> jax.Array:
        h = c * w["a"]
        mean = lax.pmean(h, "rows")
        return jnp.tanh((h - mean) * lax.rsqrt(lax.pmean((h - mean) ** 2, "rows") + 1e-3) + w["b"])

    return jnp.mean((jax.vmap(row, axis_name="rows")(x) - x) ** 2)


def coupled(w: Any, x: Any) -> Any:
    """A loop whose rows each end on their own but read the mean of all in every trip."""

    def row(c: jax.Array) -> jax.Array:
        def trip(h: jax.Array) -> jax.Array:
            return h + 0.5 + lax.pmean(jnp.abs(h), "rows")

        start = lax.stop_gradient(c @ w["a"])
        return lax.while_loop(lambda h: h < 3, trip, start) * w["a"].sum()

    return jnp.mean(jax.vmap(row, axis_name="rows")(x))


def with_kernel(w: Any, x: Any) -> Any:
    """A kernel for each row, and the branch of the platform."""
    tiles = jax.vmap(NUMBERED)(lax.stop_gradient(jnp.repeat(x[:, None], WIDTH, 1)[..., :4]))
    scale = lax.platform_dependent(x, cpu=lambda x: x * 2, default=lambda x: x * 3)
    return jnp.mean((scale @ w["a"] - tiles.sum((1, 2))) ** 2)


LOSSES = {
    f.__name__: f for f in (roots, solves, conjugate, searches, normalized, coupled, with_kernel)
}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp": {"mesh": (8,), "method": "dp"},
    "auto": {"mesh": (2, 4)},
    "microbatches": {"microbatches": 4},
    "stages": {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
}
# What reads a mean over all rows in the forward pass has no microbatches.
REFUSED = {"normalized": BatchError, "coupled": BatchStatisticError}


def _state(tx: optax.GradientTransformation) -> Any:
    draw = np.random.default_rng(0)
    w = {k: draw.standard_normal(WIDTH).astype(np.float32) for k in "ab"}
    return w, tx.init(w)


def _ran(step: Callable[..., Any], tx: optax.GradientTransformation) -> list[Any]:
    """The leaves of the last state and every loss."""
    draw, losses, state = np.random.default_rng(1), list[Any](), _state(tx)
    for _ in range(STEPS):
        state, loss = step(state, draw.standard_normal((ROWS, WIDTH)).astype(np.float32))
        losses.append(loss)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, losses))]


def _optimizer(name: str) -> optax.GradientTransformation:
    return optax.sgd(0.1) if name in ("solves", "searches", "coupled") else optax.adam(0.1)


@functools.cache
def _plain(name: str) -> list[Any]:
    tx = _optimizer(name)
    return _ran(jax.jit(descent(LOSSES[name], tx)), tx)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_rows_apart_are_as_under_plain_jit(name: str, layout: str) -> None:
    tx = _optimizer(name)
    step = autopar.parallelize(
        descent(LOSSES[name], tx), cluster=EAGER, donate=False, **LAYOUTS[layout]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is whole for want of a rule
        if name in REFUSED and layout in ("microbatches", "stages"):
            with pytest.raises(REFUSED[name], match=r"test_rows_apart\.py:\d+"):
                _ran(step, tx)
            return
        found = _ran(step, tx)
    for one, other in zip(found, _plain(name), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_rows_of_a_batch_of_systems_stay_on_their_devices() -> None:
    """The factors of 4096 systems need no collective."""
    shapes = jax.eval_shape(lambda: _state(optax.sgd(0.1)))
    plan = autopar.plan(
        descent(solves, optax.sgd(0.1)), shapes,
        jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32), cluster="8xh100", mesh=(8,),
        method="dp",
    )  # fmt: skip
    assert {t.kind for t in plan.prediction.traffic} == {"all-reduce"}
    assert sum(t.nbytes for t in plan.prediction.traffic) < 1024
