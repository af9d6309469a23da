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

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# No test says how fast a machine is: a busy one draws and runs examples slowly.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of `make test-ci` are slow as well: the default tier leaves them out."""
    if item.get_closest_marker("ci"):
        item.add_marker("slow")


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
