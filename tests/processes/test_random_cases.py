"""Random models, plans and jobs give over processes what one process gives: a sample of them."""

from __future__ import annotations

import pytest

from tests.processes.random_cases import drawn, outcomes, standing_jobs


@pytest.mark.slow
def test_random_jobs_equal_one_process() -> None:
    with standing_jobs() as jobs:
        rows = [row for seed in range(12) for row in outcomes(drawn(seed), jobs)]
    faults = [r for r in rows if r["outcome"] not in ("equal", "equal in every bit", "refused")]
    assert not faults, faults
