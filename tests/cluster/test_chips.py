"""A chip of the catalog has a row wherever one is needed; what fails names the file to edit."""

import pytest

from autopar.cli.main import CLUSTERS
from autopar.cluster.catalog import CHIPS
from autopar.cluster.chip import Chip
from autopar.cluster.cluster import Cluster
from autopar.cluster.fabric import fabric_of
from autopar.cluster.local import KINDS, chip_of_kind
from autopar.errors import ClusterError
from autopar.hlo.clock import clock_of
from autopar.runtime.aot.gpu_specs import gpu_spec


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_chip_has_every_row_that_it_needs(chip: Chip) -> None:
    missing: list[str] = []
    try:
        fabric_of(chip.name)
    except KeyError:
        missing.append("autopar/cluster/fabric.py: the links that join it")
    if chip.platform != "cpu" and chip.name not in dict(KINDS).values():
        missing.append("autopar/cluster/local.py: what JAX calls it")
    if chip.platform == "gpu":
        try:
            gpu_spec(chip.name)
        except ClusterError:
            missing.append("runtime/aot/gpu_specs.py: what XLA's compiler is told of it")
    if chip.platform == "tpu":
        try:
            clock_of(chip.name)
        except ClusterError:
            missing.append("autopar/hlo/clock.py: its clock, for libtpu's estimates")
    if chip.name not in {Cluster.parse(name).chip.name for name in CLUSTERS}:
        missing.append("autopar/cli/main.py: a usual cluster of it, for completion")
    assert not missing, f"{chip.name} has no row in {missing}"


@pytest.mark.parametrize(("part", "name"), KINDS)
def test_the_first_kind_that_matches_is_meant(part: str, name: str) -> None:
    assert chip_of_kind(f"Some {part.upper()} device") == name
