"""The key of a step tells steps apart and nothing else; the graph's text is the same everywhere."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.frontend.tracing import X, checked, shape, traced, zoo_step
from tests.house.source import ROOT

CODE = """
def {name}(w, x):
    return w + {scale} * jnp.{op}(x.T @ x), x.sum({axis})
"""
PLAIN = {"name": "step", "scale": 2.0, "op": "sin", "axis": 0}


def _made(lines_above: int = 0, **changed: Any) -> Callable[..., Any]:
    space: dict[str, Any] = {"jnp": jnp}
    exec("\n" * lines_above + CODE.format(**(PLAIN | changed)), space)
    return space[str(changed.get("name", "step"))]


def _key(fun: Callable[..., Any], *args: Any) -> str:
    return traced(fun, *(args or (shape(8, 8), X))).key


def test_it_stays_where_only_the_code_moves() -> None:
    assert _key(_made()) == _key(_made(lines_above=7)) == _key(_made(name="other"))


@pytest.mark.parametrize("changed", [{"scale": 3.0}, {"op": "cos"}, {"axis": 1}])
def test_it_changes_with_the_code(changed: dict[str, Any]) -> None:
    assert _key(_made(**changed)) != _key(_made())


def test_it_changes_with_shape_and_dtype() -> None:
    half = shape(32, 8, dtype=jnp.bfloat16)
    keys = {_key(_made(), shape(8, 8), given) for given in (X, shape(32, 8), half)}
    assert len(keys) == 3


def test_it_sees_what_loops_give_back() -> None:
    def swapping(swaps: bool) -> Callable[..., Any]:
        def body(c: Any, _: Any) -> Any:
            made = jnp.sin(c[0]), jnp.cos(c[1])
            return made[::-1] if swaps else made, None

        return lambda x: lax.scan(body, (x, x), None, length=2)[0]

    assert _key(swapping(True), X) != _key(swapping(False), X)


PRINTING = """
import json, sys
import jax
from tests.frontend.test_key import activations
from tests.frontend.tracing import X, checked, traced, zoo_step
traced(lambda x: jax.nn.softmax(jax.nn.gelu(x) * 2), X)
step = zoo_step("dropout")
json.dump([step.key + str(checked(step)), str(checked(traced(activations, X)))], sys.stdout)
"""


def activations(x: Any) -> Any:
    """Two functions that JAX traces once in a process and then knows."""
    return jax.nn.softmax(jax.nn.gelu(x))


def test_another_process_makes_the_same_text_and_key_whatever_it_traced_before() -> None:
    environment = os.environ | {"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PRINTING]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    step = zoo_step("dropout")
    assert json.loads(done.stdout) == [
        step.key + str(checked(step)),
        str(checked(traced(activations, X))),
    ]
