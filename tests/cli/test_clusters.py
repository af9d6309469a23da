"""`autopar clusters`: the catalog, and one cluster."""

from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.cluster.catalog import ENTRIES
from tests.cli.running import run, written


@pytest.mark.smoke
def test_the_catalog_has_every_chip_and_its_source() -> None:
    done = run("clusters")
    assert done.code == 0
    for word in ("8xh100", "v5e:4x4", "tpu7x:4x4x4", "NVIDIA data sheet", "2026-01", "high"):
        assert word in done.out
    data = run("clusters", "--json").data["clusters"]
    assert {c["chip"] for c in data} == {entry.chip.name for entry in ENTRIES}
    assert all(set(c["source"]) == {"what", "url", "date", "confidence"} for c in data)


@pytest.mark.parametrize("name", ["8xcpu", "4x8xa100-40gb", "v5p:4x4x4", "2xv5e:4x4", "72xgb200"])
def test_one_cluster_has_its_meshes(name: str) -> None:
    done = run("clusters", name)
    assert done.code == 0, done.err
    assert done.out.startswith(f"cluster {name}\n")
    assert "Usual meshes" in done.out
    rows = run("clusters", name, "--json").data["meshes"]
    assert rows
    assert all(r["bytes_per_second"] > 0 and r["crosses"] for r in rows)


def test_a_cluster_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, Cluster.parse("8xh100").to_toml().replace("8xh100", "mine"), "c.toml")
    done = run("clusters", path)
    assert done.code == 0, done.err
    assert done.out.startswith("cluster mine\n")


def test_a_cluster_that_is_none_ends_with_2() -> None:
    done = run("clusters", "8xh1000")
    assert done.code == 2
    assert "no chip is called 'h1000'. Close: h100" in done.err
