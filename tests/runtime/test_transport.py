"""Arrays reach another submesh in whatever layout is wanted there."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autopar.ir.sharding import MeshShape
from autopar.runtime.bind import ArrayType, bind_mesh
from autopar.runtime.transport.abstract import Endpoint, Route, limit_in_flight, nearest_awaited
from autopar.runtime.transport.local import LocalTransport

WHOLE = np.arange(64.0, dtype=np.float32).reshape(8, 8)
SIZES: list[tuple[int, ...]] = [(1,), (2,), (3,), (4,), (2, 2)]


def meshes(
    left: tuple[int, ...], right: tuple[int, ...], devices: list[jax.Device]
) -> tuple[Mesh, Mesh]:
    """One from the first devices, one from those that follow."""
    shapes = MeshShape.of(left), MeshShape.of(right)
    first, second = (s.device_count for s in shapes)
    return (
        bind_mesh(shapes[0], range(first), devices[:first]),
        bind_mesh(shapes[1], range(second), devices[first : first + second]),
    )


def specs(mesh: Mesh) -> list[P]:
    """Whole, by rows, by columns, and by both where there are two axes."""
    if mesh.devices.size == 3:
        return [P()]
    names = mesh.axis_names
    both = [P(*names), P(tuple(names)), P(None, (names[-1], names[0]))] if len(names) == 2 else []
    return [P(), P("data"), P(None, "data"), *both]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(SIZES, SIZES)), ids=str)
def test_every_layout_reaches_every_other(
    left: tuple[int, ...], right: tuple[int, ...], devices: list[jax.Device]
) -> None:
    source, target = meshes(left, right, devices)
    pairs = list(itertools.product(specs(source), specs(target)))
    routes = [
        Route(
            ArrayType(WHOLE.shape, jnp.dtype("f4"), b), ArrayType(WHOLE.shape, jnp.dtype("f4"), a)
        )
        for b, a in pairs
    ]
    carry = LocalTransport().copier(routes, Endpoint(source), Endpoint(target), 0)
    given = [jax.device_put(WHOLE + i, w.before.sharding(source)) for i, w in enumerate(routes)]
    for i, (got, way) in enumerate(zip(carry(given), routes, strict=True)):
        assert got.sharding.is_equivalent_to(way.after.sharding(target), 2)
        np.testing.assert_array_equal(got, WHOLE + i, err_msg=f"{way.before} -> {way.after}")
        assert not given[i].is_deleted()


@pytest.mark.parametrize("right", [(2,), (4,)])
def test_scalars_and_keys_travel(right: tuple[int, ...], devices: list[jax.Device]) -> None:
    source, target = meshes((2,), right, devices)
    given: list[Any] = [jnp.float32(3), jax.random.key(7), jax.random.split(jax.random.key(1), 4)]
    kinds = [ArrayType(x.shape, x.dtype, P()) for x in given]
    carry = LocalTransport().copier(
        [Route(k, k) for k in kinds], Endpoint(source), Endpoint(target), 0
    )
    placed = [jax.device_put(x, k.sharding(source)) for x, k in zip(given, kinds, strict=True)]
    number, *keys = carry(placed)
    assert float(number) == 3
    for got, key in zip(keys, given[1:], strict=True):
        assert got.devices() == set(target.devices.flat)
        np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(key))


def test_nothing_is_waited_for(devices: list[jax.Device]) -> None:
    """Whatever the layouts, an array can be sent that is not computed yet."""
    source, target = meshes((2,), (4,), devices)
    square = ArrayType((512, 512), jnp.dtype("f4"), P("data"))
    across = ArrayType((512, 512), jnp.dtype("f4"), P(None, "data"))
    carry = LocalTransport().copier([Route(square, across)], Endpoint(source), Endpoint(target), 0)

    def slowly(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ x) / 2, x)

    slow = jax.jit(slowly, out_shardings=square.sharding(source))
    x = jax.device_put(np.eye(512, dtype=np.float32), square.sharding(source))
    carry([jax.block_until_ready(slow(x))])
    made = slow(x)
    (sent,) = carry([made])
    assert not made.is_ready()
    np.testing.assert_array_equal(sent, made)


def test_a_full_window_waits_for_its_older_half() -> None:
    waits: list[tuple[int, int]] = []  # of which, before which was issued
    issued: list[int] = []

    class Token:
        def __init__(self, number: int) -> None:
            self.number = number

        def block_until_ready(self) -> None:
            waits.append((self.number, len(issued)))

    admit = limit_in_flight(16)
    for number in range(25):
        admit(Token(number))
        issued.append(number)
    assert waits == [(n, 16) for n in range(7, -1, -1)] + [(n, 24) for n in range(15, 7, -1)]
    assert min(at - n for n, at in waits) == nearest_awaited(16)
    assert (nearest_awaited(1), nearest_awaited(0)) == (1, 0)


def test_a_program_that_failed_is_not_held_against_the_next() -> None:
    """Who reads its results is told; the window only waits for it to be over."""

    class Failed:
        waited = False

        def block_until_ready(self) -> None:
            self.waited = True
            raise jax.errors.JaxRuntimeError("INTERNAL: a step of before")

    admit, failed = limit_in_flight(1), Failed()
    admit(failed)
    admit(jnp.ones(()))
    assert failed.waited
