"""What compilers are told of a cluster, of a block of it, and of what they cannot have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster, Switch, device_order
from autopar.cluster.placement import cut_out, submesh_shapes
from autopar.cluster.target import Target, target_within
from autopar.errors import ClusterError, MeshError
from autopar.ir.sharding import MeshShape


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("8xh100", "1x1x8", "h100 1x1x8"),
        ("4x8xa100-40gb", "1x4x8", "a100-40gb 1x4x8"),
        ("1xh200", "1x1x1", "h200 1x1x1"),
        ("72xgb200", "1x1x72", "gb200 1x1x72"),  # hosts of 4, but one switch joins all
        ("v5e:2x4", "v5e:2x4", "v5e:2x4"),
        ("2xv5p:2x2x4", "v5p:2x2x4", "2xv5p:2x2x4"),
        ("tpu7x:2x2x2", "tpu7x:2x2x2", "tpu7x:2x2x2"),
    ],
)
def test_topologies_as_compilers_write_them(name: str, text: str, shown: str) -> None:
    cluster = Cluster.parse(name)
    target = Target.of(cluster)
    assert target.topology == text
    assert str(target) == shown
    assert target.device_count == cluster.device_count
    assert target.memory_bytes == cluster.memory_bytes


@pytest.mark.parametrize(
    ("name", "bounds", "wraps"),
    [
        ("v5e:1x1", (1, 1, 1), (False, False, False)),
        ("v5e:2x4", (2, 2, 1), (False, False, False)),
        ("v5e:16x16", (2, 2, 1), (True, True, False)),
        ("v5p:4x4x4", (2, 2, 1), (True, True, True)),
        ("v4:2x2x1", (2, 2, 1), (False, False, False)),
    ],
)
def test_hosts_and_rings_have_three_axes(
    name: str, bounds: tuple[int, ...], wraps: tuple[bool, ...]
) -> None:
    target = Target.of(Cluster.parse(name))
    assert target.host_bounds == bounds
    assert target.wraps == wraps


def test_a_host_that_is_part_full_is_refused() -> None:
    cluster = Cluster.parse("2x8xh100")
    assert isinstance(cluster.topology, Switch)
    inside, outside = cluster.topology.levels
    level = replace(inside, size=3)
    odd = replace(cluster, topology=replace(cluster.topology, levels=(level, outside)))
    with pytest.raises(ClusterError, match=r"one of them part full.*'1x8xh100'"):
        Target.of(odd)


@pytest.mark.parametrize("name", ["2x8xh100", "v5e:4x8", "v5p:4x4x4", "2xv5e:4x4", "tpu7x:2x2x2"])
def test_every_block_has_a_target_of_its_size(name: str) -> None:
    cluster = Cluster.parse(name)
    for shape in submesh_shapes(cluster):
        count = shape.device_count
        start = cluster.device_count - count
        target, order = target_within(cluster, range(start, start + count))
        assert target.device_count == count
        assert order == tuple(range(count))
        sizes = target.topology.partition(":")[2].split("x") if target.platform == "tpu" else []
        bounds = zip(map(int, sizes), target.host_bounds, strict=False)
        assert all(size % bound == 0 for size, bound in bounds)


def test_a_block_keeps_the_order_of_its_devices() -> None:
    cluster = Cluster.parse("v5e:4x8")
    shape = next(s for s in submesh_shapes(cluster) if s.device_count == 16)
    inner = device_order(cut_out(cluster, shape), MeshShape.of("4,4"))
    target, order = target_within(cluster, [16 + i for i in inner])
    assert target.topology == "v5e:4x4"
    assert order == inner


@pytest.mark.parametrize("devices", [(0, 2), (0, 1, 2), (0, 1, 2, 4)])
def test_devices_that_are_no_block_are_refused(devices: tuple[int, ...]) -> None:
    with pytest.raises(MeshError, match="no block of neighbours"):
        target_within(Cluster.parse("8xh100"), devices)
