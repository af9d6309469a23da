"""Device i of our numbering is where the planner takes it to be, whatever JAX's order is."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cluster import Cluster, Torus, device_order
from autopar.cluster.target import Target
from autopar.errors import ClusterError
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot.devices import in_our_order, tpu_options
from autopar.runtime.aot.gpu_specs import gpu_spec
from tests.runtime.aot_programs import needs_tpu_compiler

_TPUS = [
    "v5e:1x1", "v5e:4x4", "v5e:16x16", "2xv5e:4x8", "v6e:4x8", "v5p:2x2x4", "v5p:4x4x8",
    "4xv5p:2x2x4", "v4:2x2x2", "v4:4x4x4", "tpu7x:2x2x2", "tpu7x:4x4x4", "2xv5e:16x16",
]  # fmt: skip
_SCRIPT = """
import json, sys
from autopar.cluster.target import Target
from autopar.runtime.aot.devices import devices_of
for line in sys.stdin:
    known = json.loads(line)
    found = devices_of(Target(**{**known, "wraps": tuple(known["wraps"])}))
    print(json.dumps([
        [d.core_on_chip, *d.coords, getattr(d, "slice_index", 0), d.process_index] for d in found
    ]))
"""

Place = tuple[int, ...]  # core, x, y, z, slice


@dataclass(frozen=True)
class _Device:
    """A TPU device as JAX shows it."""

    core_on_chip: int
    coords: tuple[int, int, int]
    slice_index: int

    @property
    def place(self) -> Place:
        return (self.core_on_chip, *self.coords, self.slice_index)


def _places(cluster: Cluster) -> Iterator[Place]:
    """Where the devices of a cluster are, by number: fastest along the cores of a chip."""
    topology = cluster.topology
    assert isinstance(topology, Torus)
    cores, *shape, slices = topology.lengths
    lengths = [cores, *shape, *[1] * (3 - len(shape)), slices]
    for place in itertools.product(*map(range, reversed(lengths))):
        yield tuple(reversed(place))


@pytest.mark.parametrize("name", _TPUS)
def test_tpu_devices_in_any_order_come_out_in_ours(name: str) -> None:
    places = list(_places(Cluster.parse(name)))
    devices = [_Device(p[0], (p[1], p[2], p[3]), p[4]) for p in places]
    random.Random(7).shuffle(devices)
    assert [d.place for d in in_our_order(devices)] == places


def test_gpu_devices_come_host_by_host() -> None:
    devices = [SimpleNamespace(process_index=i % 2, id=i) for i in range(8)]
    assert [d.id for d in in_our_order(devices)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_v4_chip_is_one_device() -> None:
    assert tpu_options(Target.of(Cluster.parse("v4:2x2x1")))["chip_config_name"] == "megacore"
    assert "chip_config_name" not in tpu_options(Target.of(Cluster.parse("v5p:2x2x1")))


def test_a_chip_without_a_compiler_target_is_named() -> None:
    for chip in ("v100-16gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200"):
        assert "gpu_device_info" in gpu_spec(chip)
    with pytest.raises(ClusterError, match="no target called 'mi300x'; it has v100-16gb, a100"):
        gpu_spec("mi300x")


@pytest.fixture(scope="module")
def libtpu_places() -> dict[str, list[Any]]:
    """What libtpu has at each of our numbers, found in one process of its own."""
    targets = [asdict(Target.of(Cluster.parse(name))) for name in _TPUS]
    told = {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0", "TPU_LOG_DIR": "disabled", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input="\n".join(map(json.dumps, targets)), env=told,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(_TPUS, map(json.loads, done.stdout.splitlines()), strict=True))


@needs_tpu_compiler
@pytest.mark.parametrize("name", _TPUS)
def test_libtpu_has_every_device_where_we_number_it(
    name: str, libtpu_places: dict[str, list[Any]]
) -> None:
    cluster = Cluster.parse(name)
    assert [tuple(p[:5]) for p in libtpu_places[name]] == list(_places(cluster))
    assert len({p[5] for p in libtpu_places[name]}) == cluster.hosts


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("v5e:4x4", "4,4"), ("v6e:4x8", "4,8"), ("v5p:4x4x8", "4,4,8"), ("tpu7x:4x4x4", "64,2")],
)
def test_an_axis_of_a_mesh_lies_along_an_axis_of_wires(
    name: str, mesh: str, libtpu_places: dict[str, list[Any]]
) -> None:
    cluster, shape = Cluster.parse(name), MeshShape.of(mesh)
    order = device_order(cluster, shape)
    last = shape.sizes[-1]
    for start in range(0, len(order), last):
        places = [libtpu_places[name][i][:5] for i in order[start : start + last]]
        assert sum(len(set(axis)) > 1 for axis in zip(*places, strict=True)) == 1
