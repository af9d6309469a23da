"""Fits of made-up measurements, where the right answer is known."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.calibrating.least_squares import FIRM, fit, significant
from autopar.cluster.calibration import Experiment, Sample

SIZES = tuple(4.0**i for i in range(3, 14))


def prices(figures: Mapping[str, float]) -> list[float]:
    return [figures["start"] + size / figures["rate"] for size in SIZES]


def samples(seconds: list[float], spread: float = 0.0) -> list[Sample]:
    rows = zip(SIZES, seconds, strict=True)
    return [Sample(Experiment("a", "f32", (int(n),)), t, spread, 5) for n, t in rows]


factors = st.floats(math.log(1 / 20), math.log(20)).map(math.exp)


@settings(max_examples=50)
@given(factors, factors)
def test_exact_measurements_give_the_figures_back(start: float, rate: float) -> None:
    at = {"start": 1e-5, "rate": 1e9}
    truth = {"start": 1e-5 * start, "rate": 1e9 * rate}
    found = fit(prices, samples(prices(truth)), at)
    # Starts in the shade of the transfer are known less well, and the errors say so.
    for name, figure in truth.items():
        assert abs(math.log(found[name].figure / figure)) < 0.01 + 0.5 * found[name].error


@pytest.mark.parametrize("seed", range(20))
def test_errors_cover_the_truth_under_noise(seed: int) -> None:
    chance = random.Random(seed)
    truth = {"start": 3e-5, "rate": 5e8}
    noisy = [t * chance.lognormvariate(0.0, 0.1) for t in prices(truth)]
    found = fit(prices, samples(noisy, 0.1), {"start": 1e-5, "rate": 1e9})
    for name, figure in truth.items():
        assert abs(math.log(found[name].figure / figure)) < 4 * found[name].error
        assert found[name].error < 0.3


def test_one_wild_sample_hardly_moves_the_fit() -> None:
    truth = {"start": 3e-5, "rate": 5e8}
    seconds = prices(truth)
    seconds[5] *= 30
    found = fit(prices, samples(seconds), {"start": 1e-5, "rate": 1e9})
    assert found["start"].figure == pytest.approx(truth["start"], rel=0.1)
    assert found["rate"].figure == pytest.approx(truth["rate"], rel=0.1)


def test_what_no_sample_depends_on_stays() -> None:
    at = {"start": 1e-5, "rate": 1e9, "unused": 7.0}
    found = fit(prices, samples(prices({"start": 2e-5, "rate": 2e9})), at)
    assert found["unused"].figure == 7.0
    assert found["unused"].error > FIRM > max(found["start"].error, found["rate"].error)


def test_what_only_occurs_as_a_sum_is_shared_as_it_was() -> None:
    def sums(figures: Mapping[str, float]) -> list[float]:
        return [figures["one"] + figures["two"] + size * 1e-9 for size in SIZES]

    seconds = sums({"one": 6e-5, "two": 3e-5})
    found = fit(sums, samples(seconds), {"one": 2e-5, "two": 1e-5})
    assert found["one"].figure + found["two"].figure == pytest.approx(9e-5, rel=0.02)
    assert found["one"].error > 0.3


def test_a_start_on_the_wrong_branch_of_a_minimum_is_left() -> None:
    """Of two algorithms the start has the wrong one as the cheaper everywhere."""

    def cheaper(figures: Mapping[str, float]) -> list[float]:
        return [min(figures["ring"] * n, 2 * figures["tree"] * n + 1e-6) for n in SIZES]

    seconds = cheaper({"ring": 1e-9, "tree": 1e-8})
    found = fit(cheaper, samples(seconds), {"ring": 5e-8, "tree": 1e-8})
    assert found["ring"].figure == pytest.approx(1e-9, rel=0.02)


@pytest.mark.parametrize(
    ("number", "digits", "text"), [(123456.0, 4, 123500.0), (0.0123456, 2, 0.012), (0.0, 4, 0.0)]
)
def test_significant_digits(number: float, digits: int, text: float) -> None:
    assert significant(number, digits) == text
