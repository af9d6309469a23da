"""Output that goes into a pipe: a row of a table is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import autopar

_NAME = "a_parameter_with_a_name_that_is_rather_long"


def test_a_piped_row_is_one_line(tmp_path: Path) -> None:
    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        return state, x @ state[f"{_NAME}_{_NAME}"]

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = autopar.plan(step, {f"{_NAME}_{_NAME}": shape}, shape, cluster="8xcpu", mesh=8)
    autopar.save(plan, tmp_path / "plan.json")
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "show", "plan.json", "--params"],
        cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (row,) = (line for line in done.stdout.splitlines() if _NAME in line)
    assert f"state/{_NAME}_{_NAME}" in row
    assert "f32[64,64]" in row
    assert "P(" in row
