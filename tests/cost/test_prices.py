"""The price list is plain data: equal, hashable, and strict about its axes."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.cost import Prices
from autopar.errors import MeshError
from autopar.ir.mesh import MeshShape


def prices(mesh: str) -> Prices:
    return Prices(Cluster.parse("8xh100"), MeshShape.of(mesh))


def test_prices_are_values() -> None:
    assert prices("2,4") == prices("2,4")
    assert len({prices("2,4"), prices("2,4"), prices("4,2")}) == 2


def test_axes_may_come_in_any_order() -> None:
    table = prices("2,4")
    either = [table.collective("all-gather", 1e6, axes) for axes in (("data", "model"),) * 2]
    assert either[0] == table.collective("all-gather", 1e6, ("model", "data")) == either[1]


def test_an_unknown_axis_or_a_misfit_mesh_is_an_error() -> None:
    with pytest.raises(MeshError, match="expert"):
        prices("2,4").collective("all-reduce", 1.0, ("expert",))
    with pytest.raises(MeshError, match="needs 16 devices but 8xh100 has 8"):
        prices("4,4")


def test_compute_and_elementwise_are_the_chips() -> None:
    table = prices("2,4")
    assert table.compute(1e15, 0) > table.compute(1e12, 0) > table.compute(1e12, 0, "fp8")
    assert table.elementwise(1e9) == table.compute(0, 1e9)
