"""Arrays from anywhere reach the place that a compiled step wants them in."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.runtime.pieces import StackedPieces
from autopar.runtime.place import Placer

WHOLE = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(name="mesh")
def _mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("a", "b"))


def _given(mesh: Mesh) -> dict[str, Any]:
    other = Mesh(np.array(mesh.devices.flat[:2]), ("c",))
    return {
        "on the host": WHOLE,
        "a list's items": np.float32(3),
        "a Python number": 3.0,
        "on one device": jax.device_put(WHOLE, mesh.devices.flat[3]),
        "replicated": jax.device_put(WHOLE, NamedSharding(mesh, P())),
        "across": jax.device_put(WHOLE, NamedSharding(mesh, P(None, "b"))),
        "on some of the devices": jax.device_put(WHOLE, NamedSharding(other, P("c"))),
        "a key": jax.random.key(1),
        "in pieces": StackedPieces(
            (
                jax.device_put(WHOLE[:3], mesh.devices.flat[1]),
                jax.device_put(WHOLE[3:], mesh.devices.flat[5]),
            )
        ),
    }


@pytest.mark.smoke
@pytest.mark.parametrize("is_state", [True, False])
def test_everything_arrives(mesh: Mesh, is_state: bool) -> None:
    given = list(_given(mesh).values())
    wanted = [NamedSharding(mesh, P("a", "b") if np.ndim(x) == 2 else P()) for x in given]
    placed = Placer(wanted, range(len(given)) if is_state else ())(given)
    for leaf, before, sharding in zip(placed, given, wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, before = jax.random.key_data(leaf), jax.random.key_data(before)
        np.testing.assert_array_equal(leaf, before)


def test_what_lies_right_is_handed_on(mesh: Mesh) -> None:
    x = jax.device_put(WHOLE, NamedSharding(mesh, P("a")))
    for same in (P("a"), P("a", None)):
        (placed,) = Placer([NamedSharding(mesh, same)], ())([x])
        assert placed is x


@pytest.mark.parametrize("name", ["on the host", "on one device", "a key", "in pieces"])
def test_state_from_elsewhere_is_copied(mesh: Mesh, name: str) -> None:
    given = _given(mesh)[name]
    (placed,) = Placer([NamedSharding(mesh, P())], (0,))([given])
    jax.block_until_ready(placed)
    placed.delete()
    data = jax.random.key_data(given) if name == "a key" else given
    np.testing.assert_array_equal(data, [0, 1] if name == "a key" else WHOLE)
