"""JAX's settings hold for a parallel step as for jit's, also those of a `with` block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

OPTIONS: list[dict[str, Any]] = [{}, {"microbatches": 2}, {"stages": 2, "microbatches": 2}]
SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "old random bits": lambda: jax.threefry_partitionable(False),
    "f64": lambda: jax.enable_x64(True),
    "highest precision": lambda: jax.default_matmul_precision("highest"),
}


def dropped(weights: Any, batch: Any, key: Any) -> Any:
    """An SGD step with dropout, whose loss is f64 where JAX has that."""

    def loss(weights: Any) -> jax.Array:
        hidden = jnp.tanh(batch @ weights["up"])
        hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
        off = hidden @ weights["down"] - batch
        return jnp.mean(off.astype(float) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def given() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0).standard_normal
    up, down = draw((16, 32), dtype=np.float32), draw((32, 16), dtype=np.float32)
    return {"up": up, "down": down}, draw((16, 16), dtype=np.float32), jax.random.key(3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_programs_are_made_under_the_settings_of_the_call(
    name: str, options: dict[str, Any]
) -> None:
    with SETTINGS[name]():
        (wanted, loss), (found, value) = (
            step(*given())
            for step in (jax.jit(dropped), autopar.parallelize(dropped, cluster="8xcpu", **options))
        )
        assert value.dtype == loss.dtype
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [*OPTIONS[1:], {"stages": 2, "microbatches": 1}], ids=str)
def test_bits_of_all_rows_are_cut_for_microbatches_and_for_one_that_has_all(
    options: dict[str, Any],
) -> None:
    def noisy(weights: Any, batch: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        return dropped(weights, batch + 0.1 * jax.random.normal(own, batch.shape), key), key

    with jax.threefry_partitionable(False):
        (wanted, _), _ = jax.jit(noisy)(*given())
        (found, _), _ = autopar.parallelize(noisy, cluster="8xcpu", **options)(*given())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_a_step_under_other_settings_is_another_program(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    step = autopar.parallelize(dropped, cluster="8xcpu", donate=False, **options)
    first = step(*given())[1]
    for setting in SETTINGS.values():
        with setting():
            loss, value = jax.jit(dropped)(*given())[1], step(*given())[1]
            assert value.dtype == loss.dtype
            np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert step(*given())[1] == first
    assert "jax_threefry_partitionable is False and was True" in caplog.text


def test_what_the_runtime_lays_out_is_no_transfer_that_the_user_did_not_ask_for() -> None:
    weights, batch, key = jax.device_put(given())
    step = autopar.parallelize(dropped, cluster="8xcpu", microbatches=2)
    with jax.transfer_guard("disallow"):
        weights, _ = step(weights, batch, key)
        step(weights, batch, key)


def test_a_parallel_step_is_a_method_as_jits_is() -> None:
    class Trainer:
        rate = 0.5

        @autopar.parallelize(cluster="8xcpu", static_argnums=0)
        def step(self, weights: Any, batch: Any) -> Any:
            """A step that has its rate of the trainer."""
            value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
            return weights - self.rate * gradient, value

    weights, batch = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
    new, value = Trainer().step(weights, batch)
    assert value == 16.0
    np.testing.assert_allclose(new, weights - 0.5 * 2.0)
    assert isinstance(Trainer.step, autopar.ParallelStep)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nan_is_an_error_where_jax_looks_for_it(options: dict[str, Any]) -> None:
    weights, batch, key = given()
    step = autopar.parallelize(dropped, cluster="8xcpu", donate=False, **options)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="dropped made nan or inf"):
            step(weights, batch * np.nan, key)
        assert np.isfinite(step(weights, batch, key)[1])
