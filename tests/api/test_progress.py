"""Planning and compiling tell what they are at, and may be interrupted."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.api import Watcher
from autopar.progress import progress


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
    assert told[5:7] == ["step: compiling", "step: 1 of 1 done, compiling"]
    assert told[7].startswith("step: compiling took ")
    assert len(told) == 8
    assert capsys.readouterr().err == ""  # it is no terminal


def test_a_terminal_has_a_line_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("demo", "reading"):  # what is done within it has a line below
        autopar.plan(step, W, X, cluster="8xcpu", mesh_axes=1)
    shown = capsys.readouterr().err
    assert "demo: reading" in shown
    assert "step: mesh 1 of 1 tried; the best so far is" in shown
    assert shown.rpartition("\x1b[2K")[2].strip() == "\x1b[?25h"  # nothing is left of it


def test_a_second_shape_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=8)
    parallel(W, X)
    parallel.compile(W, jnp.ones((24, 64)))  # on purpose
    parallel(W, jnp.ones((24, 64)))
    assert not caplog.records
    for rows in (8, 32):
        parallel(W, jnp.ones((rows, 64)))
    (told,) = caplog.records
    assert "* x is float32[8, 64] and was float32[24, 64]" in told.getMessage()
    assert "with step.compile(state, batch). This is said once;" in told.getMessage()


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
