"""Eight virtual CPU devices for every test, before anything asks JAX for a device."""

import gc
import os

from tests.compiling import XLA_FLAGS

# XLA reads this when it starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()

import jax

jax.config.update("jax_num_cpu_devices", 8)

# Traces and plans live long: by its usual thresholds the collector walks them again and again.
gc.set_threshold(100_000, 20, 20)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight virtual CPU devices that every sharded test runs on."""
    found = jax.devices("cpu")
    if len(found) != 8:
        pytest.fail(f"the tests need 8 CPU devices and found {len(found)}", pytrace=False)
    return found


@pytest.fixture(scope="session")
def key() -> jax.Array:
    """The random key that initial states are drawn from."""
    return jax.random.key(0)
