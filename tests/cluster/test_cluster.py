"""Clusters to files and back, their fingerprints, and the cluster that is present."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.cluster.names import local_name
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts

NAMES = (
    "8xcpu",
    "8xh100",
    "4x8xa100-40gb",
    "v5e:4x4",
    "v5p:4x4x8",
    "v6e:16x16",
    "tpu7x:4x4x4",
    "2xv5e:16x16",
)


@pytest.mark.parametrize("name", NAMES)
def test_toml_round_trip(name: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(name)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml())
    assert Cluster.from_toml(path) == cluster
    assert Cluster.parse(str(path)) == cluster
    assert Cluster.parse(path).fingerprint() == cluster.fingerprint()


def test_a_file_may_give_only_what_differs() -> None:
    text = 'like = "8xh100"\nname = "mine"\n[chip]\nmemory_bytes = 1000\n'
    mine = Cluster.from_toml_text(text)
    stock = Cluster.parse("8xh100")
    assert mine == replace(stock, name="mine", chip=replace(stock.chip, memory_bytes=1000))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name = ", "not TOML"),
        ("name = 3", "name"),
        ("name = 'a'", "[chip]"),
        ("like = '8xh100'\n[chip]\nspeed = 3", "'speed'"),
        ("like = '8xh100'\n[chip]\nmemory_bytes = 'much'", "whole number"),
        ("like = '8xh100'\n[chip]\nlaunch_seconds = true", "number"),
        ("like = '8xh100'\n[switch]\nlevels = 3", "[[switch.levels]]"),
        ("like = '8xh100'\n[torus]\nshape = [2, 2]", "either"),
        ("like = 'v5e:4x4'\n[torus]\nshape = [2, 2, 2]", "one entry for each axis"),
        (
            "like = '8xh100'\n[[switch.levels]]\nname = 'nvlink'\nsize = 8\n"
            "bytes_per_second = 1e9\nlatency_seconds = 0.0\nsmall_rate = 3.0",
            "small_rate=3.0; it is the share",
        ),
    ],
)
def test_faulty_files_name_the_entry(text: str, part: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml_text(text, "c.toml")
    assert part in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ClusterError, match=r"no-such\.toml"):
        Cluster.parse("no-such.toml")


def test_fingerprints_follow_the_content_not_the_name() -> None:
    prints = [Cluster.parse(name).fingerprint() for name in NAMES]
    assert len(set(prints)) == len(NAMES)
    assert Cluster.parse("16xh100").fingerprint() == Cluster.parse("2x8xh100").fingerprint()


def test_a_cluster_prints_as_a_short_listing() -> None:
    text = str(Cluster.parse("4x8xa100-40gb"))
    assert text.startswith("cluster 4x8xa100-40gb\n")
    assert "32 x a100-40gb (gpu) on 4 hosts" in text
    assert len(text.splitlines()) < 12


def test_the_local_cluster_is_the_present_devices() -> None:
    cluster = Cluster.local()
    assert cluster == Cluster.parse("local")
    assert cluster.chip.platform == "cpu"
    assert cluster.name == f"{cluster.device_count}xcpu"


def facts(kind: str, count: int, hosts: int = 1) -> list[DeviceFacts]:
    return [DeviceFacts("gpu", kind, 0, i * hosts // count) for i in range(count)]


def test_present_devices_to_a_cluster_name() -> None:
    assert local_name(facts("NVIDIA H100 80GB HBM3", 8)) == "8xh100"
    assert local_name(facts("NVIDIA A100-SXM4-40GB", 16, hosts=2)) == "2x8xa100-40gb"
    assert local_name(facts("Tesla V100-SXM2-16GB", 4)) == "4xv100-16gb"
    grid = [DeviceFacts("tpu", "TPU v5 lite", 0, 0, (x, y, 0)) for x in range(2) for y in range(4)]
    assert local_name(grid) == "v5e:2x4"
    two = [DeviceFacts("tpu", "TPU7x", 0, 0, (x, y, 0)) for x in (0, 0, 1, 1) for y in range(2)]
    assert local_name(two) == "tpu7x:2x2x1"


def test_present_devices_that_make_no_cluster() -> None:
    with pytest.raises(ClusterError, match="no devices"):
        local_name([])
    with pytest.raises(ClusterError, match="several kinds"):
        local_name([*facts("NVIDIA H100", 1), *facts("NVIDIA A100", 1)])
    with pytest.raises(ClusterError, match="Radeon"):
        local_name(facts("Radeon VII", 2))
