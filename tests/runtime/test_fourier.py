"""Fourier transforms beside all-gathers, whose layout XLA:CPU's transform cannot take over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar


def twice(w: jax.Array, x: jax.Array) -> Any:
    """The first transform leaves the pieces of `x` as they are, the second gathers them."""
    return w, jnp.abs(jnp.fft.fft2(jnp.fft.fft(x) * w)).mean()


def trained(w: jax.Array, x: jax.Array) -> Any:
    """Forward and backward, as layers that mix tokens by Fourier transforms do."""

    def loss(w: jax.Array) -> jax.Array:
        mixed = jnp.fft.fft2(jnp.fft.fft(x * w)).real
        return jnp.mean(jnp.tanh(mixed / 8) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


@pytest.mark.parametrize("step", [twice, trained])
def test_what_is_gathered_between_two_transforms(
    step: Callable[..., Any], devices: list[jax.Device]
) -> None:
    x = np.random.default_rng(0).standard_normal((8, 16, 8)).astype(np.float32)
    w = np.ones(8, np.float32)
    parallel = autopar.parallelize(
        step, cluster="8xcpu", mesh={"data": 8}, pins={"x": P(None, "data")}
    )
    got, expected = parallel(w, x), jax.jit(step)(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
