"""Which blocks of devices a cluster offers to stages, where they lie, and what joins them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Torus, axis_links
from autopar.cluster.placement import (
    Block,
    SubmeshShape,
    cut_out,
    link_between,
    links_in_a_row,
    place,
    submesh_families,
    submesh_shapes,
    with_fewer_hosts,
)
from autopar.errors import MeshError
from autopar.ir.sharding import MeshShape

CLUSTERS = ("8xcpu", "6xcpu", "3x6xcpu", "2x12xcpu", "8x8xv100", "v5p:2x2x4", "v5e:4x4")


def named(cluster: str, *names: str) -> list[SubmeshShape]:
    shapes = {shape.name: shape for shape in submesh_shapes(Cluster.parse(cluster))}
    return [shapes[name] for name in names]


def families(cluster: str) -> list[list[str]]:
    return [list(map(str, family)) for family in submesh_families(Cluster.parse(cluster))]


def test_hosts_of_eight_offer_the_shapes_of_alpa() -> None:
    assert families("8x8xv100") == [["1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8"]]
    assert families("1xcpu") == [["1"]]


@pytest.mark.parametrize(
    ("cluster", "fewer", "left"),
    [
        ("4x2xcpu", 1, "3x2xcpu"),
        ("4x2xcpu", 3, "2xcpu"),
        ("4x8xh100", 2, "2x8xh100"),
        ("2x72xgb200", 1, "72xgb200"),
        ("72xgb200", 3, "60xgb200"),
        ("2xv5e:16x16", 1, "v5e:16x16"),
    ],
)
def test_what_is_left_without_some_hosts(cluster: str, fewer: int, left: str) -> None:
    found, wanted = with_fewer_hosts(Cluster.parse(cluster), fewer), Cluster.parse(left)
    assert (found.hosts, found.fingerprint()) == (wanted.hosts, wanted.fingerprint())


def test_any_sizes_lie_side_by_side_on_the_outermost_axis() -> None:
    # Three hosts are parted 2 + 1, six devices of one host 4 + 2 or 3 + 3.
    assert families("3x8xv100") == [["1x1", "1x2", "1x4", "1x8", "2x8", "3x8"]]
    assert families("6xcpu") == [["1", "2", "3", "4", "6"]]


def test_hosts_of_six_have_a_family_for_halves_and_one_for_thirds() -> None:
    # Blocks of 2 and of 3 do not share a host of 6: 3 + 2 leaves a device over.
    assert families("2x6xcpu") == [
        ["1x1", "1x3", "1x6", "2x6"],
        ["1x1", "1x2", "1x6", "2x6"],
    ]
    assert list(map(str, submesh_shapes(Cluster.parse("2x6xcpu")))) == [
        "1x1", "1x2", "1x3", "1x6", "2x6",
    ]  # fmt: skip


def test_a_torus_is_sliced_across_its_slowest_axis_first() -> None:
    # All of x and y, and a part of z: rings along x and y stay whole.
    assert families("v5p:4x4x4") == [
        ["1x1x1", "2x1x1", "4x1x1", "4x2x1", "4x4x1", "4x4x2", "4x4x4"]
    ]
    assert families("tpu7x:2x2x1") == [["1x1x1.1", "1x1x1.2", "2x1x1.2", "2x2x1.2"]]


@given(st.data())
def test_every_mixture_of_a_family_tiles_the_cluster(data: st.DataObject) -> None:
    cluster = Cluster.parse(data.draw(st.sampled_from(CLUSTERS)))
    family = data.draw(st.sampled_from(submesh_families(cluster)))
    shapes: list[SubmeshShape] = []
    left = cluster.device_count
    while left:
        shapes.append(data.draw(st.sampled_from([s for s in family if s.device_count <= left])))
        left -= shapes[-1].device_count
    blocks = place(cluster, shapes)
    assert [block.shape for block in blocks] == shapes
    used = sorted(itertools.chain.from_iterable(block.devices for block in blocks))
    assert used == list(range(cluster.device_count))
    for block in blocks:
        assert extents(cluster, block) == block.shape.extents


def extents(cluster: Cluster, block: Block) -> tuple[int, ...]:
    """How far the devices of a block reach along each physical axis; they must fill it."""
    topology = cluster.topology
    if isinstance(topology, Torus):
        lengths = (topology.devices_per_chip, *topology.shape, topology.slices)
    else:
        lengths = tuple(level.size for level in topology.switch_levels)
    places: list[tuple[int, ...]] = []
    for device in block.devices:
        place_of: list[int] = []
        for length in lengths:
            device, digit = divmod(device, length)
            place_of.append(digit)
        places.append(tuple(place_of))
    spans = [max(axis) - min(axis) + 1 for axis in zip(*places, strict=True)]
    assert len(set(places)) == block.shape.device_count
    return tuple(spans)


def test_the_largest_blocks_come_first_and_equals_in_their_order() -> None:
    cluster = Cluster.parse("2x4xcpu")
    blocks = place(cluster, named("2x4xcpu", "1x1", "1x4", "1x2", "1x1"))
    assert [block.start for block in blocks] == [6, 0, 4, 7]
    assert str(blocks[2]) == "1x2 @ 4"
    assert blocks[2].devices == (4, 5)


def test_shapes_that_leave_devices_over_are_refused() -> None:
    shapes = named("2x4xcpu", "1x4", "1x2")
    with pytest.raises(MeshError, match="1x4, 1x2 do not tile the 8 devices of 2x4xcpu"):
        place(Cluster.parse("2x4xcpu"), shapes)


def test_a_block_that_would_straddle_two_hosts_is_refused() -> None:
    shapes = named("4x6xcpu", *["1x3"] * 3, *["1x2"] * 7, "1x1")
    with pytest.raises(MeshError, match="1x1, 1x2, 1x6"):
        place(Cluster.parse("4x6xcpu"), shapes)


def test_a_block_cut_out_is_a_cluster_with_the_same_links() -> None:
    cluster = Cluster.parse("8x8xv100")
    half, pair = (cut_out(cluster, shape) for shape in named("8x8xv100", "4x8", "1x2"))
    assert (half.device_count, half.hosts, pair.device_count) == (32, 4, 2)
    mesh = MeshShape.of("data=4,model=8")
    spans = [axis_links(half, mesh, [axis]) for axis in mesh.names]
    whole = MeshShape.of("replica=2,data=4,model=8")
    assert spans[1] == axis_links(cluster, whole, ["model"])
    assert [link.name for link in spans[0]] == ["network"]
    assert [link.name for link in axis_links(pair, MeshShape.of("2"), ["data"])] == ["nvlink"]


def test_a_slice_of_a_torus_keeps_the_rings_that_it_holds_whole() -> None:
    cluster = Cluster.parse("v5p:4x4x4")
    for name, wraps in [("4x4x2", (True, True, False)), ("4x1x1", (True, False, False))]:
        topology = cut_out(cluster, *named("v5p:4x4x4", name)).topology
        assert isinstance(topology, Torus)
        assert topology.wraps == wraps
    whole = cut_out(cluster, *named("v5p:4x4x4", "4x4x4"))
    assert whole.topology == cluster.topology


def test_links_within_a_host_and_between_hosts() -> None:
    cluster = Cluster.parse("2x8xh100")
    pair, host = named("2x8xh100", "1x2", "1x8")
    near = link_between(cluster, Block(0, pair), Block(4, pair))
    assert near.bytes_per_second == pytest.approx(2 * 76e9)
    far = link_between(cluster, Block(6, pair), Block(8, host))
    assert far.bytes_per_second == pytest.approx(2 * 22.8e9)
    assert far.start_seconds > near.start_seconds
    assert link_between(cluster, Block(8, host), Block(6, pair)) == far
    assert far.seconds(0) == 0
    assert far.seconds(45_600_000_000) == pytest.approx(1.0 + far.start_seconds)


def test_links_on_a_torus_are_those_through_the_smaller_face() -> None:
    cluster = Cluster.parse("v5p:4x4x4")
    topology = cluster.topology
    assert isinstance(topology, Torus)
    plane, slab = named("v5p:4x4x4", "4x4x1", "4x4x2")
    beside = link_between(cluster, Block(0, slab), Block(32, plane))
    assert beside.bytes_per_second == pytest.approx(16 * topology.link_bytes_per_second)
    assert beside.start_seconds == pytest.approx(topology.hop_seconds)
    apart = link_between(cluster, Block(0, plane), Block(48, plane))
    assert apart.start_seconds == pytest.approx(3 * topology.hop_seconds)
    # A row of four meets a plane with four wires.
    (row,) = named("v5p:4x4x4", "4x1x1")
    up = link_between(cluster, Block(12, row), Block(16, plane))
    assert up.bytes_per_second == pytest.approx(4 * topology.link_bytes_per_second)


def test_neighbours_in_a_row_cross_hosts_once_a_host() -> None:
    cluster = Cluster.parse("2x8xh100")
    quarter, host, whole = named("2x8xh100", "1x2", "1x8", "2x8")
    rates = [link.bytes_per_second for link in links_in_a_row(cluster, quarter)]
    assert len(rates) == 7
    assert rates.index(min(rates)) == 3
    assert len(links_in_a_row(cluster, host)) == 1
    assert links_in_a_row(cluster, whole) == ()
    # Four of six devices lie beside two.
    (most,) = named("6xcpu", "4")
    assert len(links_in_a_row(Cluster.parse("6xcpu"), most)) == 1
