"""The price list is plain data: equal, hashable, and strict about its axes."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.cost import Prices, compute_seconds
from autopar.cost.prices import convolution_seconds
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


# FLOPs, bytes, features of the image, whether it is a filter's gradient, and microseconds.
ON_AN_H200 = (
    (18882232320, 133578976, 3, False, 500.2),  # the first layer of a Wide-ResNet, 7 by 7
    (15105785856, 122916608, 3, False, 448.1),  # of a ResNet-50
    (15105785856, 122916608, 3, True, 296.6),  # and the gradient of its filter
    (184968806400, 113397760, 640, False, 234.1),  # 3 by 3, with strides
    (184968806400, 262389760, 2560, False, 363.1),  # the gradient of an image
    (120795955200, 46204160, 1280, False, 208.4),
    (120795955200, 74711040, 2560, False, 166.7),
    (154618822656, 201916416, 256, True, 224.8),
    (13153337344, 154206208, 256, True, 52.8),  # 1 by 1
    (6576668672, 231244288, 64, False, 73.0),  # bound by memory
)


@pytest.mark.parametrize(("flops", "nbytes", "features", "of_filter", "measured"), ON_AN_H200)
def test_convolutions_take_what_an_h200_took(
    flops: int, nbytes: int, features: int, of_filter: bool, measured: float
) -> None:
    chip = Cluster.parse("1xh200").chip
    told = convolution_seconds(chip, flops, nbytes, "bf16", features, of_filter)
    assert told * 1e6 == pytest.approx(measured, rel=0.3)
    # What comes in groups of features leaves nothing empty.
    assert convolution_seconds(chip, flops, nbytes, "bf16", None, of_filter) <= told
