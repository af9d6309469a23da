"""What devices are taken for before they are measured."""

from __future__ import annotations

import pytest

from autopar.calibrating.calibrate import starting_cluster
from autopar.calibrating.fitted import Measured, calibrated, refit
from autopar.cluster import Cluster
from autopar.cluster.names import local_name
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts
from tests.calibrating.benches import ModelBench, found_on


def gpus(kind: str, count: int, memory: int = 0, hosts: int = 1) -> list[DeviceFacts]:
    return [DeviceFacts("gpu", kind, memory, i * hosts // count) for i in range(count)]


def test_known_devices_are_the_catalog_s_with_their_own_memory() -> None:
    like, cluster = starting_cluster(gpus("NVIDIA H200", 8, 10**11))
    assert like == cluster.name == "8xh200"
    assert cluster.chip.memory_bytes == 10**11
    assert cluster.topology == Cluster.parse("8xh200").topology


@pytest.mark.slow
def test_an_unknown_gpu_is_measured_under_its_own_name() -> None:
    like, cluster = starting_cluster(gpus("NVIDIA RTX 6000 Ada", 4, 48 * 10**9, hosts=2))
    assert (like, cluster.name, cluster.chip.name) == (
        "2x2xa100-40gb",
        "2x2xrtx-6000-ada",
        "rtx-6000-ada",
    )
    assert cluster.chip.memory_bytes == 48 * 10**9
    samples = tuple(found_on(cluster, ModelBench(cluster)).samples)
    found = calibrated(cluster, Measured(samples, like, "0.10.2", "RTX", "2026-01-01"))
    again = Cluster.from_toml_text(found.to_toml())
    assert again == found
    assert refit(again) == found


def test_part_of_a_slice_is_measured_only_as_a_box() -> None:
    slice_ = [
        DeviceFacts("tpu", "TPU v5 lite", 0, 0, (x, y, 0)) for x in range(2) for y in range(4)
    ]
    like, cluster = starting_cluster([slice_[i] for i in (0, 1, 4, 5)])
    assert like == cluster.name == "v5e:2x2"
    with pytest.raises(ClusterError, match=r"the 3 devices are part of a .* whole box of chips"):
        starting_cluster([slice_[0], slice_[1], slice_[5]])


def test_cpus_of_several_processes_are_hosts() -> None:
    facts = [DeviceFacts("cpu", "cpu", 0, i // 2) for i in range(4)]
    assert local_name(facts) == "2x2xcpu"
    assert starting_cluster(facts)[1].hosts == 2
