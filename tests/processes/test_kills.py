"""A job that is killed at any instant goes on after its last checkpoint.

Three of six kills, each where it may hurt, are part of every check of a change; `python -m
benchmarks.kills` draws any number at random. Slow, as each trial starts two jobs and more.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.kills import SHAPES, Kill, Shape, Trial, drawn, outcomes

ALONE, STAGES, TWO = Shape(1, 2, 1), Shape(1, 2, 2), Shape(2, 1, 1)
MID_STEP, MID_SAVE = Kill(ALONE, 2, 0.3, 0), Kill(ALONE, 1, 0.02, 0)
TRIALS = [
    Trial((MID_STEP,), ALONE),
    Trial((MID_SAVE,), STAGES),
    Trial((Kill(TWO, 1, 0.02, 1),), STAGES),
    Trial((MID_SAVE, Kill(ALONE, "planning took", 0.1, 0)), ALONE),  # and in the recovery
    Trial((Kill(STAGES, "compiling", 0.0, 0),), ALONE),
    Trial((Kill(TWO, 2, 0.1, 0),), TWO),
]


@pytest.mark.parametrize(
    "trials",
    [
        pytest.param(TRIALS[:3], marks=pytest.mark.ci),
        pytest.param(TRIALS[3:], marks=pytest.mark.slow),
    ],
    ids=["first", "others"],
)
def test_a_killed_job_goes_on(trials: list[Trial]) -> None:
    for trial, found in zip(trials, outcomes(trials, 4, (ALONE, STAGES, TWO)), strict=True):
        assert not found["faults"], (trial, found)
        assert found["kills"], (trial, found)


@pytest.mark.slow
def test_jobs_that_are_killed_at_random_go_on() -> None:
    trials = [drawn(random.Random(seed), 4, SHAPES) for seed in range(6)]
    for trial, found in zip(trials, outcomes(trials, 4, SHAPES), strict=True):
        assert not found["faults"], (trial, found)
