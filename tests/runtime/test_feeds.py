"""Batches are cut into microbatches, and outputs put together, as plain slices would be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.batching import Rows
from autopar.ir.program import Feed, Fetch
from autopar.ir.sharding import MeshShape, Sharding
from autopar.runtime.bind import ArrayType, bind_mesh, host_of
from autopar.runtime.feeds import (
    Feeder,
    FeedType,
    Fetcher,
    FetchType,
    Home,
    stack_rows,
    unstack_rows,
)
from autopar.runtime.transport.local import LocalTransport

F4 = jnp.dtype("f4")


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Rows, int]:
    """An array with rows somewhere, and a number of microbatches."""
    small = st.integers(1, 3)
    outer, count, size, inner = (draw(small) for _ in range(4))
    front = draw(st.lists(small, max_size=2))
    back = draw(st.lists(small, max_size=2))
    shape = (*front, outer * count * size * inner, *back)
    array = np.arange(np.prod(shape)).reshape(shape)
    return array, Rows(len(front), outer, inner), count


@given(cut_arrays())
def test_a_stack_has_the_slices_in_order(cut: tuple[np.ndarray[Any, Any], Rows, int]) -> None:
    array, rows, count = cut
    stack = stack_rows(array, rows, count)
    d = rows.dim
    batch = array.shape[d] // (rows.outer * rows.inner)
    apart = array.reshape(*array.shape[:d], rows.outer, batch, rows.inner, *array.shape[d + 1 :])
    for i, slice_ in enumerate(stack):
        wanted = apart.take(range(i * batch // count, (i + 1) * batch // count), axis=d + 1)
        np.testing.assert_array_equal(slice_, wanted.reshape(slice_.shape))
    np.testing.assert_array_equal(unstack_rows(stack, rows), array)


def test_host_rows_are_viewed_and_not_copied() -> None:
    array = np.zeros((8, 3))
    assert np.shares_memory(stack_rows(array, Rows(0), 4), array)


@pytest.fixture(name="mesh")
def _mesh(devices: list[jax.Device]) -> Mesh:
    return bind_mesh(MeshShape.of((2,)), range(2), devices[2:4])


def feeder(mesh: Mesh, *feeds: FeedType, constants: dict[int, Any] | None = None) -> Feeder:
    return Feeder(feeds, [mesh], (), constants or {}, LocalTransport(), host_of([mesh]), count())


def rows_feed(rows: Rows, kind: ArrayType, count: int) -> FeedType:
    return FeedType(Feed(0, 0, Sharding(()), tuple(range(count)), rows), kind)


@pytest.mark.parametrize("where", ["host", "list", "this mesh", "another device"])
def test_rows_from_anywhere(where: str, mesh: Mesh, devices: list[jax.Device]) -> None:
    array = np.arange(48, dtype=np.float32).reshape(2, 12, 2)
    made: dict[str, Callable[[], Any]] = {
        "host": lambda: array,
        "list": lambda: array.astype(np.float64),
        "this mesh": lambda: jax.device_put(array, NamedSharding(mesh, P("data"))),
        "another device": lambda: jax.device_put(array, devices[7]),
    }
    leaf = made[where]()
    kind = ArrayType((2, 4, 2), F4, P(None, "data"))
    registers: list[list[Any]] = [[None] * 3]
    feeder(mesh, rows_feed(Rows(1), kind, 3)).fill([leaf], registers)
    for i, piece in enumerate(registers[0]):
        assert piece.dtype == F4
        assert piece.sharding.is_equivalent_to(kind.sharding(mesh), 3)
        np.testing.assert_array_equal(piece, array[:, 4 * i : 4 * i + 4])


@pytest.mark.parametrize("placed", [False, True])
def test_rows_of_keys(placed: bool, mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    leaf = jax.device_put(keys, NamedSharding(mesh, P())) if placed else keys
    registers: list[list[Any]] = [[None] * 2]
    kind = ArrayType((2,), keys.dtype, P("data"))
    feeder(mesh, rows_feed(Rows(0), kind, 2)).fill([leaf], registers)
    got = np.concatenate([jax.random.key_data(k) for k in registers[0]])
    np.testing.assert_array_equal(got, jax.random.key_data(keys))


def test_numbers_and_constants_are_placed_once(mesh: Mesh) -> None:
    index = FeedType(
        Feed(1, 0, Sharding(()), (1, 2), is_index=True), ArrayType((), jnp.dtype("i4"), P())
    )
    constant = FeedType(Feed(2, 0, Sharding(((),)), (0,)), ArrayType((3,), F4, P()))
    made = feeder(mesh, index, constant, constants={2: np.ones(3, np.float32)})
    before: list[list[Any]] = [[None] * 3]
    after: list[list[Any]] = [[None] * 3]
    made.fill([None] * 3, before)
    made.fill([None] * 3, after)
    assert [int(i) for i in before[0][1:]] == [0, 1]
    np.testing.assert_array_equal(before[0][0], np.ones(3))
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))


def test_state_that_two_submeshes_read_is_sent_from_where_it_lies(
    devices: list[jax.Device],
) -> None:
    """From the host it is placed on both; as a step leaves it, one of them is sent it."""
    meshes = [bind_mesh(MeshShape.of((2,)), range(2), devices[s : s + 2]) for s in (0, 2)]
    kinds = [ArrayType((4,), F4, P("data")), ArrayType((4,), F4, P())]
    feeds = [
        FeedType(Feed(0, 0, Sharding((("data",),)), (0,)), kinds[0]),
        FeedType(Feed(0, 1, Sharding(((),)), (0,)), kinds[1], Home(0, kinds[0])),
    ]
    made = Feeder(feeds, meshes, (0,), {}, LocalTransport(), host_of(meshes), count())
    array = np.arange(4, dtype=np.float32)
    for leaf in (array, jax.device_put(array, kinds[0].sharding(meshes[0]))):
        registers: list[list[Any]] = [[None], [None]]
        made.fill([leaf], registers)
        for held, kind, mesh in zip(registers, kinds, meshes, strict=True):
            assert held[0].sharding.is_equivalent_to(kind.sharding(mesh), 1)
            np.testing.assert_array_equal(held[0], array)


def test_outputs_with_rows_are_put_together_in_order(mesh: Mesh) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 12)
    kind, whole = ArrayType((2, 4), F4, P()), ArrayType((2, 12), F4, P(None, "data"))
    fetches = [
        FetchType(Fetch(1, 0, Sharding(((), ("data",))), (0, 1, 2), Rows(1)), kind, whole),
        FetchType(Fetch(0, 0, Sharding(()), (3,)), ArrayType((), F4, P()), ArrayType((), F4, P())),
    ]
    here = NamedSharding(mesh, P())
    parts = [jax.device_put(array[:, 4 * i : 4 * i + 4], here) for i in range(3)]
    fetcher = Fetcher(fetches, [mesh], LocalTransport(), host_of([mesh]), count())
    loss, joined = fetcher.outputs([[*parts, jax.device_put(np.float32(5), here)]])
    assert float(loss) == 5
    assert joined.sharding.is_equivalent_to(whole.sharding(mesh), 2)
    np.testing.assert_array_equal(joined, array)
