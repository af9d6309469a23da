"""Random models, plans and jobs give over processes what one process gives: a sample of them."""

from __future__ import annotations

import pytest

from tests.processes.random_cases import drawn, job


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5, 10, 15])
def test_a_random_job_equals_one_process(seed: int) -> None:
    rows = list(job(seed, [drawn(s) for s in range(seed, seed + 2)]))
    assert {row["outcome"] for row in rows} <= {"equal", "refused"}, rows
