"""Planning and compiling tell what they are at, and may be interrupted."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.api import Watcher


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda v: jnp.mean(jnp.tanh(x @ v) ** 2))(w)


W, X = jnp.ones((64, 64)), jnp.ones((16, 64))


def test_what_is_done_is_in_the_log_and_nowhere_else(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "autopar")
    autopar.parallelize(step, cluster="8xcpu", mesh_axes=1)(W, X)
    told = [record.message for record in caplog.records if record.name == "autopar"]
    assert told[0] == "step: planning"
    assert told[1].startswith("step: traced ")
    assert told[2].startswith("step: (data=8): ")
    assert told[3] == "step: mesh 1 of 1 tried"
    assert told[4].startswith("step: planning took ")
    assert told[5] == "step: compiling"
    assert told[6].startswith("step: compiling took ")
    assert len(told) == 7
    assert capsys.readouterr().err == ""  # it is no terminal


def test_a_terminal_has_a_line_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    autopar.plan(step, W, X, cluster="8xcpu", mesh_axes=1)
    lines = capsys.readouterr().err.split("\r\x1b[2K")
    assert lines[0] == lines[-1] == ""
    assert lines[1] == "step: planning"


def test_a_step_whose_planning_was_interrupted_plans_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "autopar")

    def interrupt(slot: str, given: object, made: object, seconds: float) -> None:
        if slot == "shard":
            raise KeyboardInterrupt

    parallel = autopar.parallelize(step, cluster="8xcpu", mesh_axes=1)
    with pytest.raises(KeyboardInterrupt):
        parallel.watched([Watcher(interrupt)], W, X)
    assert caplog.records[-1].message == "step: planning ended by KeyboardInterrupt"
    assert parallel.plan_for(W, X) == autopar.plan(step, W, X, cluster="8xcpu", mesh_axes=1)
