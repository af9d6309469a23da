"""State before and under a plan: where its leaves are born."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.sharding import MeshShape
from autopar.runtime.bind import bind_mesh
from autopar.runtime.state import even_sharding, init


@pytest.mark.parametrize(
    ("shape", "sharding"),
    [
        ((16, 64), "[-, x]"),
        ((64, 64), "[x, -]"),  # of equal dims the first
        ((12, 40), "[-, x]"),  # the largest that divides, not the largest
        ((12, 20), "[-, -]"),
        ((8,), "[x]"),
        ((), "[]"),
        ((0, 8), "[-, x]"),
        ((0,), "[-]"),
    ],
)
def test_a_leaf_is_stored_cut_along_its_largest_even_dim(
    shape: tuple[int, ...], sharding: str
) -> None:
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert str(even_sharding(leaf, ("x",), 8)) == sharding


@pytest.mark.smoke
def test_no_device_holds_a_whole_leaf(devices: list[jax.Device]) -> None:
    mesh = bind_mesh(MeshShape.of((8,)), range(8), devices)

    def create(key: jax.Array, scale: float) -> dict[str, jax.Array]:
        return {"w": scale * jax.random.normal(key, (16, 24)), "key": key, "n": jnp.zeros(3)}

    key = jax.random.key(3)
    state = init(create, (key,), {"scale": 2.0}, None, [mesh])
    assert {s.data.shape for s in state["w"].addressable_shards} == {(16, 3)}
    assert {s.data.shape for s in state["n"].addressable_shards} == {(3,)}
    assert jnp.allclose(state["w"], create(key, 2.0)["w"])
    assert jnp.array_equal(jax.random.key_data(state["key"]), jax.random.key_data(key))
