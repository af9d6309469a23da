"""What each form of cluster name means, and what is said of names that mean nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster, Switch, Torus
from autopar.errors import ClusterError


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [
        ("8xcpu", 8, 1),
        ("8xh100", 8, 1),
        ("4x8xa100-40gb", 32, 4),
        ("16xh100", 16, 2),
        ("8xv100", 8, 1),
        ("2x2xcpu", 4, 2),
        ("72xgb200", 72, 18),  # a host drives 4 of the rack's 72
        ("v5e:4x4", 16, 4),  # 2x2 chips a host
        ("v5e:1x1", 1, 1),
        ("v5p:4x4x8", 128, 32),
        ("v6e:16x16", 256, 64),
        ("tpu7x:4x4x4", 128, 16),  # 64 chips, two devices each, four chips a host
        ("2xv5e:16x16", 512, 128),
        (" 8xH100 ", 8, 1),
        ("v5p-64", 32, 8),  # as Google counts: 64 cores
    ],
)
def test_named_clusters(name: str, devices: int, hosts: int) -> None:
    cluster = Cluster.parse(name)
    assert (cluster.device_count, cluster.hosts) == (devices, hosts)
    assert cluster.memory_bytes == cluster.chip.memory_bytes > 2**30
    assert Cluster.parse(cluster) is cluster
    assert Cluster.parse(cluster.name) == cluster


def test_switch_levels_go_from_the_host_outwards() -> None:
    topology = Cluster.parse("4x8xa100-40gb").topology
    assert isinstance(topology, Switch)
    assert [(level.name, level.size) for level in topology.levels] == [
        ("nvlink", 8),
        ("network", 4),
    ]


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5e:4x4", (False, False)),  # rings only where an axis is 16
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True, True)),
        ("v5p:2x4x8", (False, True, True)),  # rings where an axis is a multiple of 4
        ("v4:4x4x4", (True, True, True)),
        ("tpu7x:2x2x1", (False, False, False)),
    ],
)
def test_which_axes_close_into_rings(name: str, wraps: tuple[bool, ...]) -> None:
    topology = Cluster.parse(name).topology
    assert isinstance(topology, Torus)
    assert topology.wraps == wraps


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("8xh10", ["'8xh10'", "h100", "'v5p:4x4x8'"]),
        ("h100", ["'h100'", "For 8 devices of h100: '8xh100'", "local"]),
        ("nonsense!", ["'nonsense!'", ".toml"]),
        ("12xh100", ["12 devices", "multiple of 8"]),
        ("2x9xh100", ["at most 8"]),
        ("0xh100", ["at least one"]),
        ("8xv5e", ["v5e:4x4"]),
        ("h100:4x4", ["8xh100"]),
        ("v5e:3x5", ["2, 4, 8 or 16"]),
        ("v5e:32x16", ["512 chips", "256"]),
        ("v5e:2x2x2", ["2-D"]),
        ("v5p:4x4", ["3-D", "4x4x4"]),
        ("v5p:3x4x4", ["multiple of 4"]),
        ("v4:16x16x20", ["5120 chips", "4096"]),
        ("0xv5e:4x4", ["1 or more"]),
    ],
)
def test_names_that_mean_nothing_say_what_would(name: str, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(name)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("google", "name"),
    [
        # The tables of cloud.google.com/tpu/docs/v4, v5e, v5p and v6e, read in November 2026.
        ("v4-8", "v4:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v4-1536", "v4:8x8x12"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-16", "v5p:2x2x2"),
        ("v5p-64", "v5p:2x4x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-256", "v5p:4x4x8"),
        ("v5p-512", "v5p:4x8x8"),
        ("v5p-1024", "v5p:8x8x8"),
        ("v5p-2048", "v5p:8x8x16"),
        ("v5p-4096", "v5p:8x16x16"),
        ("v5p-8192", "v5p:16x16x16"),
        ("v5p-12288", "v5p:16x16x24"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-16", "v5e:4x4"),
        ("v5litepod-256", "v5e:16x16"),
        ("v6e-1", "v6e:1x1"),
        ("v6e-8", "v6e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("2xv5p-64", "2xv5p:2x4x4"),
        ("Google V5P-64", "v5p:2x4x4"),
    ],
)
def test_the_names_that_google_gives_to_slices(google: str, name: str) -> None:
    assert Cluster.parse(google) == Cluster.parse(name)
    assert Cluster.parse(google).name == name


@pytest.mark.parametrize(
    ("google", "told"),
    [
        ("v5p-65", "there is no v5p slice of 65 cores, two to a chip; near it are .*v5p-64"),
        ("v5p-0", "near it are v5p-8, v5p-16, v5p-32"),
        ("v6e-12", "there is no v6e slice of 12 chips; near it are v6e-4, v6e-8, v6e-16"),
        ("h100-8", "is not understood.*'v5p-64'"),
    ],
)
def test_slices_that_google_does_not_have(google: str, told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        Cluster.parse(google)


@pytest.mark.parametrize(
    ("name", "factor", "larger"),
    [
        ("8xv100-16gb", 2, "16xv100-16gb"),
        ("2x8xh100", 4, "8x8xh100"),
        ("v5p:4x4x4", 2, "v5p:4x4x8"),
        ("v5p:4x4x4", 4, "v5p:4x8x8"),
        ("8xcpu", 16, "128xcpu"),
    ],
)
def test_more_of_the_same_kind(name: str, factor: int, larger: str) -> None:
    found = Cluster.parse(name).times(factor)
    assert (found.name, found.device_count) == (larger, factor * Cluster.parse(name).device_count)


def test_what_cannot_be_larger() -> None:
    with pytest.raises(ClusterError, match="cannot be built"):
        Cluster.parse("v5e:16x16").times(2)
    with pytest.raises(ClusterError, match="is not what its name says"):
        replace(Cluster.parse("8xh100"), name="4xh100").times(2)
