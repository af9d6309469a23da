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
from autopar.runtime.spanning import spread

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


@pytest.mark.parametrize(
    ("host", "spec"),
    [
        (np.array(3.0, np.float32), P()),
        (np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2], P("a")),
        (np.arange(24, dtype=np.float32).reshape(4, 6).T, P(None, "b")),
        (np.zeros((0, 4), np.float32), P(None, "a")),
        (np.ones(4, bool), P(("a", "b"))),
        (np.ones(4, np.int64), P("a")),
    ],
    ids=["scalar", "strided", "transposed", "empty", "bool", "wide"],
)
def test_host_arrays_are_laid_out_as_device_put_does(
    host: Any, spec: P, devices: list[jax.Device]
) -> None:
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, spec)
    got, wanted = spread(host, sharding), jax.device_put(host, sharding)
    np.testing.assert_array_equal(got, wanted)
    assert (got.sharding, got.dtype, got.committed) == (
        wanted.sharding, wanted.dtype, wanted.committed
    )  # fmt: skip
    assert got.aval.weak_type == wanted.aval.weak_type
