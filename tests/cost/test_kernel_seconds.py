"""Seconds of listings, by hand."""

import pytest

from autopar.cluster import Cluster
from autopar.cost.prices import Prices, compute_seconds
from autopar.cost.reshard import Resharder
from autopar.cost.timeline import Seconds, timed_listing
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape
from autopar.passes.base import Setting
from autopar.passes.shard.optimal import Optimal
from autopar.rules import attach_rules
from tests.lowering import lower_checked

DOT = """
graph step(%x: f32[64,512] batch "x", %w: f32[512,256] state "w") {
  %y: f32[64,256] = dot_general(%x, %w)
    flops=16777216 {dimension_numbers=(((1,), (0,)), ((), ()))}
  %z: f32[64,256] = tanh(%y) flops=16384
  %s: f32[] = reduce_sum(%z) flops=16384 {axes=(0, 1)}
  return %s
}
"""
ROWS = (("x", (("data",), ())), ("w", ((), ())))


def priced(count: int) -> tuple[Seconds, Prices]:
    """The step with its rows over so many devices."""
    graph = attach_rules(parse_graph(DOT))
    cluster, mesh = Cluster.parse("8xh100"), MeshShape.of((count,))
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=ROWS))
    prices = Prices(cluster, mesh)
    program = lower_checked(graph, sharding, Resharder(prices))
    return timed_listing(graph, program, prices).seconds, prices


def test_a_dot_and_a_fused_reduction() -> None:
    """On 8 devices the dot has an eighth of the work; tanh runs within the sum that reads it."""
    seconds, prices = priced(8)
    x, w, y = 64 * 512 * 4 / 8, 512 * 256 * 4, 64 * 256 * 4 / 8
    dot = compute_seconds(prices.cluster.chip, 16777216 / 8, x + w + y, "f32")
    total = prices.elementwise(y + 4)
    assert seconds.compute == pytest.approx(dot + total)
    assert seconds.communication == prices.collective("all-reduce", 4, ("data",))


def test_seconds_add_up() -> None:
    once = Seconds(1.0, 2.0, 0.5)
    assert once + once.times(2) == Seconds(3.0, 6.0, 1.5)
    assert once.times(3).total == 4.5  # what is hidden takes no time


@pytest.mark.parametrize(("region", "moved"), [("update", (3, 2, 2)), ("backward", (3, 3, 4))])
def test_an_update_loads_each_piece_once(region: str, moved: tuple[int, ...]) -> None:
    """One kernel makes the moments and the parameter of Adam."""
    piece = "f32[1024,1024]"
    text = f"""graph step(%p: {piece} state "p", %m: {piece} state "m", %v: {piece} state "v",
                          %g: {piece} batch "g") {{
      %m1: {piece} = add(%m, %g) {region}
      %v1: {piece} = mul(%v, %g) {region}
      %u: {piece} = div(%m1, %v1) {region}
      %p1: {piece} = sub(%p, %u) {region}
      return %p1 "p", %m1 "m", %v1 "v"
    }}"""
    graph, cluster = attach_rules(parse_graph(text)), Cluster.parse("8xh100")
    mesh, lies = MeshShape.of((8,)), (("data",), ())
    pins = tuple((name, lies) for name in "pmvg")
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=pins))
    prices = Prices(cluster, mesh)
    seconds = timed_listing(
        graph, lower_checked(graph, sharding, Resharder(prices)), prices
    ).seconds
    nbytes = 1024 * 1024 * 4 / 8
    assert seconds.compute == pytest.approx(sum(prices.elementwise(n * nbytes) for n in moved))


@pytest.mark.parametrize(("width", "ends"), [(2048, "%y"), (2048, "%y, %m"), (16384, "%y")])
def test_a_softmax_loads_its_rows_once(width: int, ends: str) -> None:
    """Where its maxima are read elsewhere they are a kernel of their own, and so is all where rows
    are too long for a tile.
    """
    rows, piece = "f32[64]", f"f32[64,{width}]"
    along = f"{{broadcast_dimensions=(0,), shape=(64, {width})}}"
    text = f"""graph step(%x: {piece} batch "x") {{
      %m: {rows} = reduce_max(%x) {{axes=(1,)}}
      %b: {piece} = broadcast_in_dim(%m) {along}
      %d: {piece} = sub(%x, %b)
      %e: {piece} = exp(%d)
      %s: {rows} = reduce_sum(%e) {{axes=(1,)}}
      %c: {piece} = broadcast_in_dim(%s) {along}
      %y: {piece} = div(%e, %c)
      return {ends}
    }}"""
    graph, cluster = attach_rules(parse_graph(text)), Cluster.parse("8xh100")
    mesh = MeshShape.of((8,))
    sharding = Optimal().run(graph, Setting(cluster, mesh, 2**60, pins=(("x", (("data",), ())),)))
    prices = Prices(cluster, mesh)
    seconds = timed_listing(
        graph, lower_checked(graph, sharding, Resharder(prices)), prices
    ).seconds
    x, row = 8 * width * 4, 8 * 4
    moved = {
        (2048, "%y"): (x + row, row, x),
        (2048, "%y, %m"): (x + row, x + 2 * row, x),
        (16384, "%y"): (x + row, x + 2 * row, 2 * x + 2 * row),
    }[width, ends]
    assert seconds.compute == pytest.approx(sum(prices.elementwise(n) for n in moved))
