"""Runs commands in this process, on files written for them."""

import json
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from click.testing import CliRunner

from autopar.cli.main import main
from tests.house.source import ROOT

SCHEMA: Any = runpy.run_path(str(ROOT / "docs" / "reference" / "json_schemas.py"))["schema"]
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
    words: tuple[str, ...] = ()

    @property
    def data(self) -> Any:
        """The JSON object on stdout, which has the form that the reference says."""
        data = json.loads(self.out)
        if "--json" in self.words:
            faults = list(departures(data, SCHEMA(_command(self.words))))
            assert not faults, f"docs/reference/json_schemas.py is not what prints: {faults[:3]}"
        return data


def _command(words: tuple[str, ...]) -> str:
    """The command whose form the output of these words has."""
    name, *rest = words
    if name == "clusters" and len(rest) > 1:
        return "clusters NAME"
    return "schedule --plan" if name == "schedule" and "--plan" in rest else name


def departures(data: Any, form: Any, place: str = "") -> Iterator[str]:
    """The places at which data is not as a JSON Schema of `docs/reference/schemas` has it."""
    kinds = form["type"] if isinstance(form["type"], list) else [form["type"]]
    if not any(_is_a(data, kind) for kind in kinds):
        yield f"{place} is {data!r:.40}, not {' or '.join(kinds)}"
    elif isinstance(data, list) and "items" in form:
        for i, entry in enumerate(data):
            yield from departures(entry, form["items"], f"{place}[{i}]")
    elif isinstance(data, dict):
        known, other = form.get("properties", {}), form.get("additionalProperties", True)
        yield from (f"{place}.{k} is missing" for k in form.get("required", ()) if k not in data)
        for key, entry in data.items():
            if key in known or isinstance(other, dict):
                yield from departures(entry, known.get(key, other), f"{place}.{key}")
            elif not other:
                yield f"{place}.{key} should not be there"


def _is_a(data: Any, kind: str) -> bool:
    if isinstance(data, bool):
        return kind == "boolean"
    types = {
        "string": str, "integer": int, "number": int | float, "array": list, "object": dict,
        "null": type(None), "boolean": bool,
    }  # fmt: skip
    return isinstance(data, types[kind])


def run(*words: str | Path) -> Ran:
    """The command `autopar WORDS...`."""
    done = CliRunner(env={"COLUMNS": COLUMNS}).invoke(main, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    given = tuple(map(str, words))
    return Ran(done.exit_code, done.stdout, done.stderr, given)


def written(folder: Path, text: str = STEP, name: str = "mytrain.py") -> Path:
    """A file of the user's."""
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path
