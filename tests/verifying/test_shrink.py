"""Meshes cut down to fewer devices."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import VerifyError
from autopar.ir.sharding import MeshShape
from autopar.verifying.shrink import smaller_mesh


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ((8, 8), 8, (2, 4)),
        ((64,), 8, (8,)),
        ((2, 16), 8, (2, 4)),
        ((3, 9), 9, (3, 3)),
        ((6,), 2, (2,)),
    ],
)
def test_axes_are_cut_evenly(
    sizes: tuple[int, ...], devices: int, expected: tuple[int, ...]
) -> None:
    assert smaller_mesh(MeshShape.of(sizes), devices).sizes == expected


@given(st.lists(st.integers(1, 12), min_size=1, max_size=2), st.integers(1, 16))
def test_axes_divide_and_stay(sizes: list[int], devices: int) -> None:
    mesh = MeshShape.of(sizes)
    try:
        small = smaller_mesh(mesh, devices)
    except VerifyError:
        least = math.prod(_least_factor(n) for n in mesh.sizes)
        assert devices < least
        return
    assert small.device_count <= devices
    for before, after in zip(mesh.sizes, small.sizes, strict=True):
        assert before % after == 0
        assert (after > 1) == (before > 1)


def _least_factor(number: int) -> int:
    return next((f for f in range(2, number) if number % f == 0), number)


def test_what_cannot_be_smaller_is_told() -> None:
    with pytest.raises(VerifyError, match=r"shrinks to \(data=2, model=2\) and no further"):
        smaller_mesh(MeshShape.of((4, 8)), 2)
