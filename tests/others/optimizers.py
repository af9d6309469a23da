"""Optimizers of optax and jaxopt whose state is more than moments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.errors import BatchStatisticError
from tests.others.case import ROWS, Other, Refusal, rows

_WIDTH = 16


def _params() -> Any:
    one, two = jax.random.split(jax.random.key(0))
    return {
        "up": {"w": jax.random.normal(one, (_WIDTH, 32)) * 0.3, "b": jnp.zeros((32,))},
        "down": {"w": jax.random.normal(two, (32, _WIDTH)) * 0.3, "b": jnp.zeros((_WIDTH,))},
    }


def _loss(params: Any, x: Any) -> Any:
    h = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])
    return jnp.mean((h @ params["down"]["w"] + params["down"]["b"] - x) ** 2)


def _batch(seed: int) -> Any:
    return rows(_WIDTH, seed)


def _other(tx: Any, **options: Any) -> Other:
    def step(state: Any, x: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(_loss)(params, x)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return Other(step, lambda: (_params(), tx.init(_params())), _batch, **options)


def multi_transform() -> Other:
    labels = {"up": "slow", "down": {"w": "fast", "b": "frozen"}}
    kinds: Any = {
        "slow": optax.sgd(0.01, momentum=0.9),
        "fast": optax.adamw(1e-2, eps=1e-3),
        "frozen": optax.set_to_zero(),
    }
    return _other(optax.multi_transform(kinds, labels))


def inject_hyperparams() -> Other:
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return _other(optax.inject_hyperparams(optax.adamw)(learning_rate=rate, eps=1e-3))


def multi_steps() -> Other:
    return _other(optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2))


def apply_if_finite() -> Other:
    return _other(optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), max_consecutive_errors=3))


def lookahead() -> Other:
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: _loss(p.fast, x))(params)
        updates, opt = tx.update(grads.fast, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    def create() -> Any:
        params = optax.LookaheadParams.init_synced(_params())
        return params, tx.init(params)

    return Other(step, create, _batch)


def schedule_free() -> Other:
    contrib: Any = pytest.importorskip("optax.contrib")
    return _other(contrib.schedule_free_adamw(1e-2, eps=1e-3))


def muon() -> Other:
    contrib: Any = pytest.importorskip("optax.contrib")
    return _other(contrib.muon(1e-2), rtol=2e-3)


def sam() -> Other:
    """Sharpness-aware minimization, which takes a gradient within the update."""
    contrib: Any = pytest.importorskip("optax.contrib")
    tx = contrib.sam(
        optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)),
        sync_period=2, opaque_mode=True,
    )  # fmt: skip

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(_loss)(params, x)
        again = lambda p, _: jax.grad(_loss)(p, x)  # noqa: E731
        updates, opt = tx.update(grads, opt, params, grad_fn=again)
        return (optax.apply_updates(params, updates), opt), loss

    return Other(step, lambda: (_params(), tx.init(_params())), _batch)


def lbfgs() -> Other:
    """A line search, which is a loop, within the update."""
    tx = optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(4))

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(_loss)(params, x)
        updates, opt = tx.update(
            grads, opt, params, value=loss, grad=grads, value_fn=lambda p: _loss(p, x)
        )
        return (optax.apply_updates(params, updates), opt), loss

    in_loop = Refusal(BatchStatisticError, "a statistic of the batch is used inside a loop")
    return Other(
        step, lambda: (_params(), tx.init(_params())), _batch, rtol=2e-3,
        refusals={"microbatches": in_loop, "stages": in_loop},
    )  # fmt: skip


def private_gradients() -> Other:
    """A gradient of each row, clipped by itself, and noise from a key in the optimizer's state."""
    contrib: Any = pytest.importorskip("optax.contrib")
    tx = contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.5, seed=0)

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        of_rows = jax.vmap(jax.value_and_grad(_loss), in_axes=(None, 0))
        loss, grads = of_rows(params, x[:, None])
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), jnp.mean(loss)

    return Other(step, lambda: (_params(), tx.init(_params())), _batch)


def mechanic() -> Other:
    """A learning rate that the optimizer finds by itself, around another one."""
    contrib: Any = pytest.importorskip("optax.contrib")
    return _other(contrib.mechanize(optax.adamw(1e-2, eps=1e-3)), rtol=2e-3)


def meta_learner() -> Other:
    """MAML: each row is a task of its own, learnt within the loss of what is learnt over all."""
    tx = optax.adam(1e-2, eps=1e-3)

    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def adapted(params: Any, shown: Any) -> Any:
            for _ in range(2):
                grads = jax.grad(_loss)(params, shown)
                params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return params

        def loss_of(params: Any) -> Any:
            learnt: Any = jax.vmap(lambda x: _loss(adapted(params, x[:3]), x[3:]))
            return jnp.mean(learnt(batch))

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    def batch(seed: int) -> Any:
        return rows(5 * _WIDTH, seed).reshape(-1, 5, _WIDTH)

    return Other(step, lambda: (_params(), tx.init(_params())), batch)


def sequence_labels() -> Other:
    """The CTC loss: a scan over time whose rows end at frames of their own."""
    tx = optax.adam(1e-2, eps=1e-3)

    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        x, missing, labels, no_label = batch

        def loss_of(params: Any) -> Any:
            h = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])
            logits = h @ params["down"]["w"] + params["down"]["b"]
            return jnp.mean(optax.ctc_loss(logits, missing, labels, no_label))

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        frames, most = 8, 3
        held, told = rng.integers(6, frames + 1, ROWS), rng.integers(1, most + 1, ROWS)
        return (
            rows(frames * _WIDTH, seed).reshape(-1, frames, _WIDTH),
            (np.arange(frames) >= held[:, None]).astype(np.float32),
            rng.integers(1, _WIDTH, (ROWS, most)).astype(np.int32),
            (np.arange(most) >= told[:, None]).astype(np.float32),
        )

    return Other(step, lambda: (_params(), tx.init(_params())), batch)


def jaxopt_solver() -> Other:
    jaxopt: Any = pytest.importorskip("jaxopt")
    solver = jaxopt.GradientDescent(_loss, maxiter=3, stepsize=0.1, tol=0.0, jit=True, unroll=True)

    def step(params: Any, x: Any) -> Any:
        found = solver.run(params, x)
        return found.params, found.state.error

    # Three steps of descent on the same rows: each needs the gradient of all of them.
    in_loop = Refusal(BatchStatisticError, "a statistic of the batch is used inside a loop")
    refusals = {"microbatches": in_loop, "stages": in_loop}
    return Other(step, _params, _batch, refusals=refusals)
