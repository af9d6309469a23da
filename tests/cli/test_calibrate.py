"""`autopar calibrate`: measures eight virtual devices, and what is planned with its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.calibrating import calibrate as door
from autopar.cluster import Cluster
from autopar.report.clusters import show_error
from autopar.runtime.measure.bench import DeviceBench
from tests.calibrating.benches import ModelBench
from tests.cli.running import run, written


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "cluster.toml"
    done = run("calibrate", "--devices", "cpu:8", "--quick", "--seconds", "200", "-o", path)
    assert done.code == 0, done.err
    for part in ("cluster 8xcpu", "Measured figures", "±", "Prices against measurements"):
        assert part in done.out
    assert "saved to" in done.out
    return path


@pytest.mark.ci
def test_the_file_is_a_cluster_that_knows_where_its_figures_come_from(measured: Path) -> None:
    cluster = Cluster.from_toml(measured)
    assert "measured by autopar calibrate on 8 x cpu" in cluster.chip.source.what
    assert cluster.calibration is not None
    kinds = {sample.experiment.kind for sample in cluster.calibration.samples}
    assert {"launch", "scale", "add", "matmul", "all-reduce", "collective-permute"} <= kinds
    data = run("clusters", measured, "--json").data
    figures = data["calibration"]["figures"]
    assert figures["host.bytes_per_second"]["relative_error"] > 0
    assert figures["host.bytes_per_second"]["value"] == data["link_bytes_per_second"]


@pytest.mark.ci
def test_plans_are_made_with_it(measured: Path, tmp_path: Path) -> None:
    model = written(tmp_path)
    ours = run("plan", model, "--cluster", measured, "--json")
    stock = run("plan", model, "--cluster", "8xcpu", "--json")
    assert ours.code == stock.code == 0, ours.err
    assert ours.data != stock.data


@pytest.mark.ci
def test_fitting_again_gives_the_same_file(measured: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.toml"
    done = run("calibrate", "--from", measured, "-o", again, "--json")
    assert done.code == 0, done.err
    assert done.data["calibration"]["samples"] > 20
    assert again.read_bytes() == measured.read_bytes()


def test_stopped_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: DeviceBench, *asked: object) -> None:
        del self, asked
        raise KeyboardInterrupt

    monkeypatch.setattr(DeviceBench, "timed", interrupted)
    path = tmp_path / "cluster.toml"
    done = run("calibrate", "--devices", "2", "--quick", "-o", path)
    assert done.code == 130
    assert done.err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--devices", "gpu:8"], "'cpu:8' (eight virtual CPU devices)"),
        (["--devices", "99"], "99 devices are to be measured but JAX has 8"),
        (["--devices", "0,77"], "there are no devices [77]"),
        (["--devices", "1,1"], "name one twice"),
        (["--devices", "some"], "are not understood"),
        (["--devices", "2", "--seconds", "0.001"], "give it more time"),
        (["--from", "8xh100.toml"], "cannot be read"),
        (["--seconds", "-3"], "not in the range"),
    ],
)
def test_faults_end_with_2_and_write_nothing(words: list[str], part: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    done = run("calibrate", "--quick", "-o", path, *words)
    assert done.code == 2
    assert part in done.err
    assert not path.exists()


def test_a_file_without_measurements_cannot_be_fitted_again(tmp_path: Path) -> None:
    path = written(tmp_path, Cluster.parse("8xcpu").to_toml(), "stock.toml")
    done = run("calibrate", "--from", path, "-o", tmp_path / "new.toml")
    assert done.code == 2
    assert "carries no measurements" in done.err


def test_one_device_has_no_links_and_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up: Callable[..., ModelBench] = lambda cluster, devices: ModelBench(cluster)  # noqa: E731
    monkeypatch.setattr(door, "DeviceBench", made_up)
    done = run("calibrate", "--devices", "1", "-o", tmp_path / "one.toml")
    assert done.code == 0, done.err
    assert "one device has no links to measure" in done.err
    assert "the time was over" not in done.err


@pytest.mark.parametrize(
    ("error", "text"), [(0.031, "±3.1%"), (0.0, "±0.0%"), (0.7, "2.0-fold"), (1.6, "5.0-fold")]
)
def test_errors_read_as_shares_or_factors(error: float, text: str) -> None:
    assert show_error(error) == text
