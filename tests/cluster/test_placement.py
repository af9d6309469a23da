"""Where meshes lie on clusters: device order, links of each axis, candidate shapes."""

from __future__ import annotations

import math

import pytest

from autopar.cluster import Cluster, axis_links, device_order, mesh_shapes
from autopar.cluster.placement import apart
from autopar.cluster.switch import greedy_shares
from autopar.cluster.torus import torus_shares
from autopar.errors import MeshError
from autopar.ir.sharding import MeshShape


def spans(cluster: str, mesh: str, *axes: str) -> list[tuple[str, int]]:
    links = axis_links(Cluster.parse(cluster), MeshShape.of(mesh), axes)
    return [(link.name, link.size) for link in links]


def test_the_last_axis_stays_inside_the_host() -> None:
    # 4 hosts of 8: model=8 fills a host, data=4 is one device of each host.
    assert spans("4x8xh100", "data=4,model=8", "model") == [("nvlink", 8)]
    assert spans("4x8xh100", "data=4,model=8", "data") == [("network", 4)]
    assert spans("4x8xh100", "data=4,model=8", "data", "model") == [("nvlink", 8), ("network", 4)]
    # model=4 takes half a host, data=8 the other half and the hosts.
    assert spans("4x8xh100", "data=8,model=4", "data") == [("nvlink", 2), ("network", 4)]


def test_an_axis_that_does_not_nest_goes_to_another_level() -> None:
    # 3 does not divide a host of 8, but there are 3 hosts.
    assert spans("3x8xh100", "data=8,model=3", "model") == [("network", 3)]
    assert spans("3x8xh100", "data=8,model=3", "data") == [("nvlink", 8)]
    # Device number = 8 host + place: model walks the hosts.
    order = device_order(Cluster.parse("3x8xh100"), MeshShape.of("data=8,model=3"))
    assert order[:6] == (0, 8, 16, 1, 9, 17)


def test_an_axis_of_one_device_crosses_nothing() -> None:
    assert spans("8xcpu", "data=8,model=1", "model") == []


def test_mesh_axes_take_whole_directions_of_a_torus() -> None:
    assert spans("v5p:4x4x8", "data=8,model=16", "model") == [("x", 4), ("y", 4)]
    assert spans("v5p:4x4x8", "data=8,model=16", "data") == [("z", 8)]
    assert spans("v5p:4x4x8", "data=16,model=8", "model") == [("z", 8)]


def test_a_part_of_a_direction_is_no_ring_and_shares_its_links() -> None:
    cluster, mesh = Cluster.parse("v5e:16x16"), MeshShape.of("data=64,model=4")
    (near,) = axis_links(cluster, mesh, ["model"])
    far, whole = axis_links(cluster, mesh, ["data"])
    assert (near.size, near.wraps) == (4, False)
    # The other 4 positions along x are each 4 devices apart: four groups share the wires.
    assert (far.size, far.wraps) == (4, False)
    assert far.bytes_per_second == pytest.approx(near.bytes_per_second / 4)
    assert (whole.size, whole.wraps) == (16, True)
    # Both axes together fill the direction again.
    assert [link.wraps for link in axis_links(cluster, mesh, ["data", "model"])] == [True, True]


def test_the_devices_of_a_chip_are_closest_and_slices_farthest() -> None:
    assert spans("tpu7x:4x4x4", "data=16,model=8", "model") == [("chip", 2), ("x", 4)]
    assert spans("2xv5e:4x4", "data=2,model=16", "data") == [("data-center network", 2)]
    assert spans("2xv5e:4x4", "data=8,model=4", "data") == [("y", 4), ("data-center network", 2)]


def test_device_order_follows_the_links() -> None:
    # v5e:2x4 is x=2, y=4 and device = x + 2 y. model=4 takes y whole, data=2 takes x.
    order = device_order(Cluster.parse("v5e:2x4"), MeshShape.of("data=2,model=4"))
    assert order == (0, 2, 4, 6, 1, 3, 5, 7)
    # Row-major on a host needs no change.
    assert device_order(Cluster.parse("8xh100"), MeshShape.of("2,4")) == tuple(range(8))


@pytest.mark.parametrize("name", ["2x8xh100", "v5e:4x8", "v5p:2x2x4", "tpu7x:2x2x2", "2xv5e:2x4"])
def test_every_mesh_uses_every_device_once(name: str) -> None:
    cluster = Cluster.parse(name)
    for mesh in mesh_shapes(cluster.device_count, 3):
        assert sorted(device_order(cluster, mesh)) == list(range(cluster.device_count))
        sizes = [math.prod(x.size for x in axis_links(cluster, mesh, [a])) for a in mesh.names]
        assert tuple(sizes) == mesh.sizes


def test_shares_multiply_out() -> None:
    # Fastest first: 6 takes gcd(6, 4) = 2 of the 4 and gcd(3, 6) = 3 of the 6; 4 the rest.
    assert greedy_shares((4, 6), (4, 6)) == ((2, 2), (2, 3))
    # 16 = 4 x 4 leaves no direction split; 8 is the third.
    assert torus_shares((8, 16), (4, 4, 8)) == ((1, 1, 8), (4, 4, 1))


def test_a_mesh_of_another_size_says_what_would_do() -> None:
    cluster = Cluster.parse("8xh100")
    with pytest.raises(MeshError, match=r"data=4, model=4 needs 16 devices but 8xh100 has 8"):
        device_order(cluster, MeshShape.of("4,4"))
    with pytest.raises(MeshError, match="'data=2, model=4'"):
        axis_links(cluster, MeshShape.of("2,2"), ["data"])
    with pytest.raises(MeshError, match=r"no axis \['expert'\]"):
        axis_links(cluster, MeshShape.of("2,4"), ["expert"])


def test_mesh_shapes() -> None:
    assert [s.sizes for s in mesh_shapes(8)] == [(8,), (2, 4), (4, 2)]
    assert [s.sizes for s in mesh_shapes(8, 3)][-1] == (2, 2, 2)
    assert mesh_shapes(8)[1].names == ("data", "model")
    assert mesh_shapes(1) == (MeshShape((), ()),)
    assert [s.sizes for s in mesh_shapes(7, 3)] == [(7,)]
    with pytest.raises(MeshError, match="at least 1 device"):
        mesh_shapes(0)


@pytest.mark.parametrize(
    ("cluster", "axes", "left"),
    [
        ("8xh100", 2, ["data=8", "data=2, model=4"]),  # one switch
        ("2x8xh100", 2, ["data=16", "data=2, model=8", "data=4, model=4", "data=8, model=2"]),
        # Axes of 4 and 8 take a direction of the torus each, whichever comes first.
        ("v5e:4x8", 2, ["data=32", "data=2, model=16", "data=4, model=8", "data=16, model=2"]),
    ],
)
def test_meshes_are_apart_where_an_axis_crosses_other_links(
    cluster: str, axes: int, left: list[str]
) -> None:
    target = Cluster.parse(cluster)
    assert [str(m) for m in apart(target, mesh_shapes(target.device_count, axes))] == left
