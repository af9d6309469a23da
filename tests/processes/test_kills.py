"""A job that is killed at any instant goes on after its last checkpoint.

Slow, as a trial starts Python and JAX three times and more, in up to two processes: six
of them and the undisturbed jobs take minutes. The six are part of every check of a change.
"""

from __future__ import annotations

import pytest

from benchmarks.kills import SHAPES, trials


@pytest.mark.slow
def test_a_killed_job_goes_on() -> None:
    (found,) = trials(1, seed=0, steps=4, shapes=SHAPES[:1])
    assert not found["faults"], found


@pytest.mark.ci
@pytest.mark.slow
def test_killed_jobs_go_on_in_any_shape() -> None:
    for found in trials(6, seed=1, steps=6, shapes=SHAPES):
        assert not found["faults"], found
