"""A leaf in pieces is an array to whoever reads it, and a leaf to JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ArgumentError
from autopar.frontend import StepSpec, trace
from autopar.frontend.traced import Piece
from autopar.runtime.pieces import StackedPieces, cut, cut_leaves, join_outputs, piece_sizes

WHOLE = np.arange(12.0, dtype=np.float32).reshape(6, 2)


@pytest.fixture(name="stack")
def _stack(devices: list[jax.Device]) -> StackedPieces:
    return StackedPieces(
        (jax.device_put(WHOLE[:2], devices[0]), jax.device_put(WHOLE[2:], devices[5]))
    )


def test_it_reads_as_one_array(stack: StackedPieces) -> None:
    assert (stack.shape, stack.ndim, stack.size, len(stack)) == ((6, 2), 2, 12, 6)
    assert stack.dtype == np.float32
    np.testing.assert_array_equal(stack, WHOLE)
    np.testing.assert_array_equal(np.asarray(stack, np.float64), WHOLE.astype(np.float64))
    np.testing.assert_array_equal(stack.gather(), WHOLE)
    assert repr(stack) == "StackedPieces(float32[6,2]: 2 on cpu 0, 4 on cpu 5)"
    twice = StackedPieces((*stack.pieces[:1], *stack.pieces[:1], *stack.pieces))
    assert repr(twice) == "StackedPieces(float32[10,2]: 6 on cpu 0, 4 on cpu 5)"
    np.testing.assert_array_equal(jnp.asarray(stack), WHOLE)
    assert stack.block_until_ready() is stack


def test_it_is_a_leaf(stack: StackedPieces) -> None:
    leaves, _ = jax.tree.flatten({"w": stack, "n": 1})
    assert leaves == [1, stack]


def test_a_step_is_traced_on_its_shape_alone(stack: StackedPieces) -> None:
    traced = trace(StepSpec(jnp.negative), (stack,), {})
    assert traced.graph.inputs[0].value.shape == (6, 2)


def test_keys_are_gathered_as_keys(devices: list[jax.Device]) -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    stack = StackedPieces(tuple(jax.device_put(keys[i : i + 2], devices[i]) for i in (0, 2)))
    gathered = stack.gather(jax.sharding.SingleDeviceSharding(devices[1]))
    np.testing.assert_array_equal(jax.random.key_data(gathered), jax.random.key_data(keys))


@pytest.mark.parametrize("kind", ["host", "device", "pieces", "other pieces"])
def test_any_leaf_can_be_cut(kind: str, stack: StackedPieces, devices: list[jax.Device]) -> None:
    leaf: Any = {"host": WHOLE, "device": jax.device_put(WHOLE, devices[1])}.get(kind, stack)
    sizes = (3, 3) if kind == "other pieces" else (2, 4)
    pieces = cut(leaf, sizes)
    np.testing.assert_array_equal(pieces[0], WHOLE[: sizes[0]])
    np.testing.assert_array_equal(pieces[1], WHOLE[sizes[0] :])
    assert (pieces is stack.parts) == (kind == "pieces")


def test_a_leaf_of_other_rows_is_refused() -> None:
    with pytest.raises(ArgumentError, match="6 rows is to be cut into"):
        cut(WHOLE, (2, 2))


def test_leaves_are_cut_and_put_together_as_the_step_says(stack: StackedPieces) -> None:
    sizes = piece_sizes([Piece(0), Piece(1, 0, 2), Piece(1, 2, 6), Piece(2)])
    assert sizes == ((), (2, 4), ())
    first, top, rest, last = cut_leaves(["a", stack, "b"], sizes)
    assert (first, last) == ("a", "b")
    joined = join_outputs([first, top, rest, last], sizes)
    assert joined[0] == "a"
    assert joined[2] == "b"
    assert joined[1].pieces == stack.pieces
    assert cut_leaves(["a", "b"], ()) == join_outputs(["a", "b"], ()) == ["a", "b"]
