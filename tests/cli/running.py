"""Runs commands in this process, on files written for them."""

import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from click.testing import CliRunner

from autopar.cli.main import main

COLUMNS = "120"
STEP = """
import jax
import jax.numpy as jnp


def train_step(state, batch):
    grad = jax.grad(lambda w: jnp.mean((batch @ w["up"] @ w["down"]) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad)


def example_args():
    shape = jax.ShapeDtypeStruct
    state = {"up": shape((64, 128), jnp.float32), "down": shape((128, 64), jnp.float32)}
    return state, shape((256, 64), jnp.float32)
"""


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON object on stdout."""
        return json.loads(self.out)


def run(*words: str | Path) -> Ran:
    """The command `autopar WORDS...`."""
    done = CliRunner(env={"COLUMNS": COLUMNS}).invoke(main, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


def written(folder: Path, text: str = STEP, name: str = "mytrain.py") -> Path:
    """A file of the user's."""
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path
