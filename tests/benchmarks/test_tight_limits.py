"""No pin makes a plan under a limit faster by more than the gap that the plan states."""

from __future__ import annotations

import pytest

from benchmarks.tight_limits import CLOSE, PLANS, row
from tests.zoo.registry import cases

# A plan for 8xh100 at 0.8 of its bytes, where a pin of the largest argument once took 6.8 % less
# than the plan, and one of the third 1.4 %: the solver's sum was the same, the kernels were not.
# The second takes 11 % less where it looks around the layout that is best around the first again.
_SAMPLES = ("mlp", "8xh100", 0.8), ("mlp_equinox", "8xh100", 0.8)


@pytest.mark.parametrize(
    ("model", "cluster", "share", "pins"),
    [
        pytest.param(*plan, 3, marks=pytest.mark.ci if plan in _SAMPLES else pytest.mark.slow)
        for plan in PLANS
    ],
)
def test_no_pin_beats_a_plan_under_a_limit(
    model: str, cluster: str, share: float, pins: int
) -> None:
    found = row(cases("adam")[model], cluster, share, pins)
    assert "failed" not in found, found
    assert (found["excess"] or 0.0) <= CLOSE, found
