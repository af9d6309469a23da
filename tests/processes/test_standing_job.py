"""A standing job answers one scenario after the other, and tells how it ends."""

from __future__ import annotations

import time

import jax
import pytest

from tests.processes.jobs import BrokenJob, standing_job

pytestmark = pytest.mark.ci
HERE = "tests.processes.test_standing_job"


def place() -> list[int]:
    return [jax.process_index(), jax.process_count(), len(jax.devices())]


def raises_in_one() -> None:
    if jax.process_index() == 1:
        raise ValueError("a bad row")
    time.sleep(1000)


def hangs_in_one() -> None:
    if jax.process_index() == 1:
        time.sleep(1000)


def test_scenarios_in_turn_and_one_that_raises() -> None:
    with standing_job(2, 2) as job:
        for _ in range(2):
            assert job.results(f"{HERE}:place") == [[0, 2, 4], [1, 2, 4]]
        began = time.monotonic()
        with pytest.raises(BrokenJob, match="ValueError: a bad row") as broken:
            job.results(f"{HERE}:raises_in_one")
        assert not broken.value.is_hung
        assert time.monotonic() - began < 15  # no one waits for the process that is gone


def test_a_scenario_that_hangs_is_broken_off() -> None:
    with standing_job(2, 1) as job, pytest.raises(BrokenJob) as broken:
        job.results(f"{HERE}:hangs_in_one", limit=2.0)
    assert broken.value.is_hung
