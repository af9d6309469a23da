"""What a step of one program leaves in cells is taken from there, and is as exact as arrays are."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.bind import ArrayType
from autopar.runtime.cells import Cells, CellType, InCell, Place, as_array

SPEC = PartitionSpec("x")
KIND = ArrayType((4,), np.dtype(np.float32), SPEC)


@pytest.fixture(name="meshes")
def _meshes(devices: list[jax.Device]) -> tuple[Mesh, ...]:
    return tuple(Mesh(np.array(devices[i : i + 2]), ("x",)) for i in (0, 2))


def _type(meshes: tuple[Mesh, ...], *used: int) -> CellType:
    """Cells of two rows on each device, in use on some submeshes."""
    joint = Mesh(np.stack([m.devices for m in meshes]), ("stage", "x"))
    sharding = NamedSharding(joint, PartitionSpec(("stage", "x")))
    whole = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
    return CellType(whole, meshes, tuple(KIND if s in used else None for s in range(2)))


class Loop:
    """A step that adds one to a cell, as an executor drives its cells."""

    def __init__(self, kind: CellType, *lazy: tuple[int, int]) -> None:
        registers = [0 if k is not None else -1 for k in kind.kinds]
        places = [Place(s, s, KIND.sharding(kind.meshes[s])) for s in kind.own]
        self.cells = Cells([(kind, registers)], [(kind, registers)], (0,), places, lazy)
        self._add: Any = jax.jit(lambda x: x + 1, donate_argnums=0)
        self.taken: Any = None

    def __call__(self, *inputs: Any) -> list[Any]:
        registers = [[leaf] for leaf in self.cells.seen(inputs)]
        self.taken = self.cells.gathers[0](registers)
        self.cells.spreads[0](self._add(self.taken), registers)
        return [held[0] for held in registers]


def _start(meshes: tuple[Mesh, ...]) -> list[jax.Array]:
    return [jax.device_put(np.arange(4.0) + 10 * s, KIND.sharding(m)) for s, m in enumerate(meshes)]


def _values(leaves: list[Any]) -> list[list[float]]:
    return [np.asarray(as_array(leaf)).tolist() for leaf in leaves]


@pytest.mark.parametrize("lazy", [(), ((0, 0), (1, 0)), ((1, 0),)], ids=["plain", "lazy", "both"])
def test_what_comes_straight_back_is_the_cell_as_it_is(
    lazy: tuple[tuple[int, int], ...], meshes: tuple[Mesh, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(_type(meshes, 0, 1), *lazy)
    state = loop(*_start(meshes))
    assert [type(leaf) is InCell for leaf in state] == [(s, 0) in lazy for s in range(2)]
    monkeypatch.setattr(CellType, "make", property(lambda self: pytest.fail("made anew")))
    before = state
    state = loop(*loop(*state))
    assert all(leaf.is_deleted() for leaf in before)
    assert _values(state) == [[3, 4, 5, 6], [13, 14, 15, 16]]


@pytest.mark.parametrize("lazy", [(), ((0, 0), (1, 0))], ids=["plain", "lazy"])
def test_a_leaf_that_the_user_changes_is_taken(
    lazy: tuple[tuple[int, int], ...], meshes: tuple[Mesh, ...]
) -> None:
    loop = Loop(_type(meshes, 0, 1), *lazy)
    old, kept = loop(*_start(meshes))
    new = jax.device_put(np.full(4, 100.0, np.float32), old.sharding)
    state = loop(new, kept)
    assert _values(state) == [[101] * 4, [12, 13, 14, 15]]
    assert kept.is_deleted()
    assert not old.is_deleted()
    assert _values([old]) == [[1, 2, 3, 4]]
    assert _values(loop(*state)) == [[102] * 4, [13, 14, 15, 16]]


def test_leaves_that_change_places_are_not_taken_for_one_another(meshes: tuple[Mesh, ...]) -> None:
    """Two cells of one type, of which each gives a leaf to the other."""
    kind = _type(meshes, 0, 1)
    loop = Loop(kind, (0, 0), (1, 0))
    a, b = loop(*_start(meshes))
    c, d = loop(*_start(meshes))
    assert _values(loop(a, d)) == [[2, 3, 4, 5], [12, 13, 14, 15]]
    assert (a.is_deleted(), b.is_deleted()) == (True, False)
    assert _values([b]) == [[11, 12, 13, 14]]
    assert _values([c]) == [[1, 2, 3, 4]]


def test_nobodys_part_of_a_cell_goes_on_with_the_leaf_that_it_came_with(
    meshes: tuple[Mesh, ...],
) -> None:
    loop = Loop(_type(meshes, 0))
    (state,) = loop(_start(meshes)[0])
    other = jnp.copy(state)
    (state,) = loop(other)
    assert _values([state]) == [[2, 3, 4, 5]]
    assert _values(loop(state)) == [[3, 4, 5, 6]]


@pytest.mark.parametrize("lazy", [(), ((0, 0), (1, 0))], ids=["plain", "lazy"])
def test_no_memory_outlives_the_leaves(
    lazy: tuple[tuple[int, int], ...], meshes: tuple[Mesh, ...]
) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    loop = Loop(_type(meshes, 0, 1), *lazy)
    gc.disable()
    try:
        state = loop(*loop(*_start(meshes)))
        state = loop(*state)
        loop.taken = None
        assert len(jax.live_arrays()) > before
        del state
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


def test_a_cell_is_not_held_for_one_of_its_arrays(meshes: tuple[Mesh, ...]) -> None:
    loop = Loop(_type(meshes, 0, 1))
    state = loop(*_start(meshes))
    cell = weakref.ref(loop.cells.seen(state)[0].cell)
    one = state.pop()
    del state
    assert cell() is None
    assert not one.is_deleted()


def test_a_copy_of_what_is_in_a_cell_is_an_array(meshes: tuple[Mesh, ...]) -> None:
    loop = Loop(_type(meshes, 0, 1), (0, 0), (1, 0))
    (leaf, _) = loop(*_start(meshes))
    twin = copy.deepcopy(leaf)
    assert isinstance(twin, jax.Array)
    np.testing.assert_array_equal(twin, leaf.array)
    assert leaf.array is leaf.array
    assert (leaf.shape, leaf.dtype) == (twin.shape, twin.dtype)
    assert leaf.block_until_ready() is leaf
