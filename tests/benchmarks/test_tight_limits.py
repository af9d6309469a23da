"""No pin makes a plan under a limit faster by more than the gap that the plan states."""

from __future__ import annotations

import pytest

from benchmarks.tight_limits import CLOSE, PLANS, row
from tests.zoo.registry import cases


@pytest.mark.ci
def test_no_pin_beats_a_small_plan_under_a_limit() -> None:
    check("mlp", "8xcpu", 0.6, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "share", "pins"), [pytest.param(*plan, 3) for plan in PLANS]
)
def test_no_pin_beats_a_plan_under_a_limit(
    model: str, cluster: str, share: float, pins: int
) -> None:
    check(model, cluster, share, pins)


def check(model: str, cluster: str, share: float, pins: int) -> None:
    """No pin of so many of the largest arguments is faster by more than the gap."""
    found = row(cases("adam")[model], cluster, share, pins)
    assert "failed" not in found, found
    assert (found["excess"] or 0.0) <= CLOSE, found
