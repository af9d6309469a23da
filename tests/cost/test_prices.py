"""The price list is plain data: equal, hashable, and strict about its axes."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.cost import Prices, compute_seconds
from autopar.errors import MeshError
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape
from autopar.rules import attach_rules

OPS = """
graph step(%x: bf16[64,512] batch "x", %w: bf16[512,256] state "w") {
  %y: bf16[64,256] = dot_general(%x, %w)
    flops=16777216 {dimension_numbers=(((1,), (0,)), ((), ()))}
  %z: bf16[64,256] = tanh(%y) flops=16384
  return %z
}
"""


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


def test_a_kernel_takes_what_the_chip_takes_for_its_share() -> None:
    """A product is bound by arithmetic or by memory, all else by memory."""
    table, graph = prices("2,4"), attach_rules(parse_graph(OPS))
    chip, (product, tanh) = table.cluster.chip, graph.ops
    assert table.kernel(product, 0, 1) > table.kernel(product, 0, 8) > 0
    assert table.kernel(product, 1e6, 8) == compute_seconds(chip, product.flops / 8, 1e6, "bf16")
    assert table.kernel(product, 1e9, 8) == table.kernel(product, 1e9, 1)
    assert table.kernel(tanh, 1e9, 8) == table.elementwise(1e9) == table.kernel(tanh, 1e9, 1)
