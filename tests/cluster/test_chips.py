"""A chip is one entry of the catalog: everything that asks for a chip finds it there."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from autopar.cli.main import cluster_names, main
from autopar.cluster import catalog
from autopar.cluster.catalog import ENTRIES, Entry, chip_of_kind, usual_clusters
from autopar.cluster.chip import GpuTarget
from autopar.cluster.cluster import Cluster
from autopar.cluster.names import local_name
from autopar.hlo.clock import clock_of
from autopar.ir.devices import DeviceFacts
from autopar.runtime.aot.gpu_specs import gpu_spec
from tests.cli.running import run

KINDS = [(part, entry.chip.name) for entry in ENTRIES for part in entry.kinds]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.chip.name)
def test_an_entry_is_whole(entry: Entry) -> None:
    platform, name = entry.chip.platform, entry.chip.name
    assert bool(entry.kinds) == (platform != "cpu")
    assert (entry.target is not None) == (platform == "gpu")
    assert (entry.clock_mhz is not None) == bool(entry.gke) == (platform == "tpu")
    assert entry.usual
    assert {Cluster.parse(usual).chip.name for usual in entry.usual} == {name}


@pytest.mark.parametrize(("part", "name"), KINDS)
def test_the_longest_kind_that_matches_is_meant(part: str, name: str) -> None:
    assert chip_of_kind(f"Some {part.upper()} device") == name


def test_a_new_chip_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    old = next(entry for entry in ENTRIES if entry.chip.name == "h100")
    new = Entry(
        replace(old.chip, name="x900"),
        old.fabric,
        usual=("4xx900",),
        kinds=("turbo x900",),
        aliases=("x9",),
        target=GpuTarget("Turbo X900", 9, 12, 10, 10, 10, 1.0, 2048, minor=3),
        clock_mhz=500,
    )
    monkeypatch.setattr(catalog, "ENTRIES", (*ENTRIES, new))
    assert Cluster.parse("2x8xx900") == Cluster.parse("2x8xx9")
    facts = [DeviceFacts("gpu", "Turbo X900 80GB", 0, 0)] * 4
    assert local_name(facts) == "4xx900"
    assert 'device_description_str: "Turbo X900"' in gpu_spec("x900")
    assert "major: 9 minor: 3 feature" in gpu_spec("x900")
    assert clock_of("x900") == 500e6
    assert usual_clusters()[-1] == "4xx900"
    context = click.Context(main)
    found = cluster_names(context, main.params[0], "4xx")
    assert [item.value for item in found] == ["4xx900"]
    assert "4xx900" in run("clusters").out
