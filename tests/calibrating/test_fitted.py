"""Clusters calibrated on made-up devices come out as those devices are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.calibrating.calibrate import skipped_lines
from autopar.calibrating.fitted import Measured, calibrated, predicted_seconds, refit
from autopar.calibrating.ladder import FULL, QUICK, LadderEffort, ladder
from autopar.cluster import Cluster
from autopar.cluster.calibration import Sample
from autopar.errors import ClusterError
from autopar.report.clusters import figure_of
from tests.calibrating.benches import ModelBench, figures, found_on, measured, shifted

NAMES = ("8xcpu", "8xh100", "2x8xa100-80gb", "v5e:4x4", "2xv5e:4x4", "tpu7x:2x2x1", "1xh100")
PATIENT, LOOK = replace(FULL, seconds=1e9), replace(QUICK, seconds=1e9)


def other(cluster: Cluster, seed: int, factors: Sequence[float] = (0.2, 0.5, 1, 1.5, 3)) -> Cluster:
    """Devices that are not as the catalog has them."""
    chance = random.Random(seed)
    names = [name for name in figures(cluster) if "reduction" not in name]
    return shifted(cluster, {name: chance.choice(factors) for name in names})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "8xh100" else ()) for n in NAMES]
)
def test_figures_come_back_through_noise(name: str) -> None:
    cluster = Cluster.parse(name)
    truth = other(cluster, 1)
    found = measured(cluster, ModelBench(truth, noise=0.03), LOOK)
    assert found.calibration is not None
    right, ours = figures(truth), figures(found)
    for bar in found.calibration.bars:
        off = abs(ours[bar.figure] / right[bar.figure] - 1)
        assert off < 4 * bar.relative_error + 0.02, bar
    assert all(r.median < 0.06 and r.largest < 0.2 for r in found.calibration.residuals)
    assert found.chip.source.confidence == "high"


@pytest.mark.parametrize("name", ["8xcpu", "2x8xa100-80gb", "v5e:4x4"])
def test_prices_hold_where_nothing_was_measured(name: str) -> None:
    """A quick look prices every experiment of a thorough one."""
    cluster = Cluster.parse(name)
    truth = other(cluster, 2, (0.5, 1, 1.5))
    found = measured(cluster, ModelBench(truth), LOOK)
    for experiment in ladder(cluster, PATIENT):
        right = predicted_seconds(truth, experiment)
        assert predicted_seconds(found, experiment) == pytest.approx(right, rel=0.25), experiment


def test_the_same_measurements_give_the_same_file() -> None:
    cluster = Cluster.parse("8xcpu")
    samples = found_on(cluster, ModelBench(other(cluster, 3), 0.1), LOOK).samples
    backwards = tuple(reversed(samples))
    one, two = (
        calibrated(cluster, Measured(rows, "8xcpu", "0.10.2", "cpu", "2026-01-01")).to_toml()
        for rows in (tuple(samples), backwards)
    )
    assert one == two


@pytest.mark.parametrize("name", ["8xcpu", "8xh100", "2xv5e:4x4", "1xh100"])
def test_a_calibrated_cluster_survives_its_file(name: str) -> None:
    cluster = Cluster.parse(name)
    found = measured(cluster, ModelBench(other(cluster, 4), 0.1), LOOK)
    again = Cluster.from_toml_text(found.to_toml())
    assert again == found
    assert again.fingerprint() == found.fingerprint() != cluster.fingerprint()
    assert refit(again) == found
    assert hash(again) == hash(found)


def test_bars_name_figures_of_the_cluster() -> None:
    for name in ("8xcpu", "8xh100", "2xv5e:4x4"):
        cluster = Cluster.parse(name)
        found = measured(cluster, ModelBench(cluster), LOOK)
        assert found.calibration is not None
        known = figures(found)
        for bar in found.calibration.bars:
            assert figure_of(found, bar.figure) == known[bar.figure]
            assert found.calibration.error_of(bar.figure) == bar.relative_error


def test_a_dtype_that_cannot_run_keeps_its_ratio_and_is_told_of() -> None:
    cluster = Cluster.parse("1xh100")
    truth = shifted(cluster, {f"peak_flops.{d}": 0.5 for d, _ in cluster.chip.peak_flops})
    bench = ModelBench(truth, refused="fp8")
    findings = found_on(cluster, bench)
    assert skipped_lines(findings) == [
        "matmul fp8 was not measured from size 262144 on: TypeError: no such unit"
    ]
    assert sum(e.dtype == "fp8" for e, _ in bench.asked) == 1
    found = measured(cluster, ModelBench(truth, refused="fp8"))
    assert found.chip.flops_for("fp8") == pytest.approx(0.5 * 0.78 * 1979e12, rel=0.02)
    assert found.calibration is not None
    assert found.calibration.error_of("peak_flops.fp8") is None


def test_what_is_too_large_for_the_devices_is_left_out_and_what_is_smaller_is_not() -> None:
    cluster = Cluster.parse("8xcpu")
    bench = ModelBench(cluster, refused_from=2**20)
    findings = found_on(cluster, bench, PATIENT)
    sizes = {s.experiment.shape[0] for s in findings.samples if s.experiment.kind == "all-reduce"}
    assert len(sizes) > 3
    assert max(sizes) < 2**20
    refused = [e for e, _ in bench.asked if e.kind == "all-reduce" and e.shape[0] >= 2**20]
    assert len(refused) < 4


def test_repetitions_last_as_long_as_asked_for_once_the_pace_is_known() -> None:
    cluster = Cluster.parse("8xcpu")
    everything = {name: 50.0 for name in figures(cluster)}
    slow = shifted(
        cluster,
        {n: f if "seconds" in n and "bytes" not in n else 0.1 for n, f in everything.items()},
    )
    bench = ModelBench(slow)
    found_on(cluster, bench)
    seen: set[tuple[str, str, str, str]] = set()
    spans: list[float] = []
    for experiment, trips in bench.asked:
        if experiment.series in seen and trips > 2:
            spans.append(trips * predicted_seconds(slow, experiment))
        seen.add(experiment.series)
    assert len(spans) > 20
    assert max(spans) < 10 * FULL.span


class TestTooLittle:
    """Measurements that no cluster can be made of."""

    def refusal(self, effort: LadderEffort, name: str = "8xcpu") -> str:
        cluster = Cluster.parse(name)
        with pytest.raises(ClusterError) as caught:
            measured(cluster, ModelBench(cluster), effort)
        return str(caught.value)

    def test_no_time(self) -> None:
        assert "a tiny op was measured at 0 sizes" in self.refusal(replace(QUICK, seconds=-1.0))

    def test_time_for_the_first_round(self) -> None:
        text = self.refusal(replace(QUICK, seconds=14.0))
        assert "memory was measured at 1 size and a fit needs 2" in text
        assert "--seconds" in text

    def test_links_at_one_size(self) -> None:
        cluster = Cluster.parse("8xcpu")
        samples = found_on(cluster, ModelBench(cluster)).samples
        few = [s for s in samples if not s.experiment.axis or s.experiment.shape[0] == 4096]
        with pytest.raises(ClusterError, match="collectives over host were measured at one size"):
            calibrated(cluster, Measured(tuple(few), "8xcpu", "", "", ""))

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_clock_that_stands_still(self, seconds: float) -> None:
        cluster = Cluster.parse("8xcpu")
        samples = found_on(cluster, ModelBench(cluster)).samples
        broken = (replace(samples[0], seconds=seconds), *samples[1:])
        with pytest.raises(ClusterError, match="measure it again"):
            calibrated(cluster, Measured(broken, "8xcpu", "", "", ""))

    def test_nothing_to_fit_again(self) -> None:
        with pytest.raises(ClusterError, match="carries no measurements"):
            refit(Cluster.parse("8xcpu"))


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("relative_error", "error", "'error'"),
        ("counts = [", "counts = [7, ", "shapes, seconds, spreads and counts"),
        ("shapes = [[", "shapes = [7, [", "list of ints"),
        ("seconds = [", "seconds = [true, ", "list of floats"),
        ('jax = "0.10.2"', "jax = 10", "must be a text"),
    ],
)
def test_faulty_calibrations_name_the_entry(old: str, new: str, part: str) -> None:
    cluster = Cluster.parse("8xcpu")
    text = measured(cluster, ModelBench(cluster), LOOK).to_toml()
    assert old in text
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml_text(text.replace(old, new, 1), "c.toml")
    assert part in str(caught.value)


def test_a_sample_is_kept_as_it_was_taken() -> None:
    cluster = Cluster.parse("8xcpu")
    samples = found_on(cluster, ModelBench(cluster, 0.1)).samples
    found = calibrated(cluster, Measured(tuple(samples), "8xcpu", "", "", ""))
    assert found.calibration is not None

    def by_name(sample: Sample) -> str:
        return str(sample.experiment)

    assert sorted(found.calibration.samples, key=by_name) == sorted(samples, key=by_name)
