"""A run that loses hosts goes on with the plans that were made beforehand, on the same batches."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.kills import TRAIN, Job, Shape, distance, parameters
from tests.cli.running import run, written

PLANNED = """
from functools import partial

import train

train_step = partial(train.train_step, size=train.TINY)


def example_args():
    return train.example_args(train.TINY)
"""


def plain(train: Any, steps: int) -> list[np.ndarray[Any, Any]]:
    """The state after so many steps of `jax.jit` on one device."""
    size, text = train.TINY, train.corpus()
    state = train.create_state(jax.random.key(0), size)
    step = jax.jit(lambda state, rows: train.train_step(state, rows, size))
    length = size.length + 1
    for number in range(steps):
        starts = np.random.default_rng(number).integers(len(text) - length, size=size.batch)
        rows = np.array([text[s : s + length].astype(np.int32) for s in starts])
        state, _ = step(state, rows)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_four_hosts_then_three_then_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TRAIN.parent)
    plans = tmp_path / "plans"
    words = ("--cluster", "4x1xcpu", "--method", "fsdp", "--fallbacks", "2", "-o", plans)
    done = run("plan", written(tmp_path, PLANNED), *words)
    assert done.code == 0, done.err
    for hosts, steps in ((4, 2), (3, 4), (2, 6)):
        shape = Shape(hosts, 1, 1)
        job = Job(shape, tmp_path, tmp_path / "compiled", steps, "--plan", plans)
        assert job.ends(600.0) == [0] * hosts, job.said
        assert (
            f"the plan is {plans}/{hosts}-hosts.json, for {hosts} cpu on {hosts} hosts" in job.said
        )
        assert "planning" not in job.said
        assert job.first_step == steps - 2
    assert distance(parameters(tmp_path, 6), plain(importlib.import_module("train"), 6)) < 1e-3
