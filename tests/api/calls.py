"""A small step in each form in which a step runs, for tests of how it may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

FORMS: Mapping[str, Mapping[str, Any]] = {
    "one program": {"mesh": (8,), "method": "dp"},
    "microbatches": {"mesh": (8,), "method": "dp", "microbatches": 2},
    "stages": {"stages": 2, "microbatches": 2},
}


def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step of plain gradient descent on two weights."""

    def loss_fn(w: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"] - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def state_of(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Two weights on the host."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((8, 8), np.float32) for n in "ab"}


def batch_of(seed: int = 0) -> np.ndarray[Any, Any]:
    """Sixteen rows."""
    return np.random.default_rng([seed, 1]).standard_normal((16, 8), np.float32)


def parallel(form: str, fun: Callable[..., Any] = train_step, **options: Any) -> Any:
    """A step in one of the forms."""
    given: dict[str, Any] = {"cluster": "8xcpu", **FORMS[form], **options}
    return autopar.parallelize(fun, **given)


def assert_equal(got: Any, wanted: Any) -> None:
    """The same numbers but for rounding."""
    for mine, plain in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, plain = jax.random.key_data(mine), jax.random.key_data(plain)
        np.testing.assert_allclose(mine, plain, rtol=2e-5, atol=1e-5)
