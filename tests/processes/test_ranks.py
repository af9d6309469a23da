"""`autopar verify --processes`: a plan over processes of this machine, beside the plain step."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import VerifyError
from autopar.runtime.pieces import StackedPieces
from autopar.runtime.validation.ranks import Pieces, whole
from tests.cli.running import run

FILE = """
import jax
import jax.numpy as jnp

WIDTH, LAYERS, ROWS = 8, 4, 8


def create_state(key):
    return {"w": 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH)), "step": jnp.int32(0)}


def train_step(state, batch):
    def loss_of(weights):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None
        made, _ = jax.lax.scan(layer, batch, weights)
        return jnp.mean((made - batch[:, ::-1]) ** 2)

    loss, slope = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * slope, "step": state["step"] + 1}, loss


def example_args():
    state = jax.eval_shape(create_state, jax.random.key(0))
    return state, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
"""


def laid(array: jax.Array, devices: list[jax.Device], *spec: str | None) -> jax.Array:
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def test_pieces_are_put_together_as_they_lay(devices: list[jax.Device]) -> None:
    array = jnp.arange(32.0).reshape(8, 4)
    for spec in ((), ("a",), ("b", "a"), (None, "a")):
        np.testing.assert_array_equal(whole([Pieces.of(laid(array, devices, *spec))]), array)
    stack = StackedPieces((laid(array[:4], devices, "a"), laid(array[4:], devices, None, "b")))
    np.testing.assert_array_equal(whole([Pieces.of(stack)]), array)
    scalar = laid(jnp.int32(3), devices)
    assert whole([Pieces.of(scalar)]) == 3


def test_keys_stay_keys(devices: list[jax.Device]) -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    found = whole([Pieces.of(laid(keys, devices, "a"))])
    assert found.dtype == keys.dtype
    assert (jax.random.key_data(found) == jax.random.key_data(keys)).all()


def test_what_no_process_has_is_missed(devices: list[jax.Device]) -> None:
    own = Pieces.of(laid(jnp.arange(8.0), devices, "a"))
    half = Pieces(own.impl, own.shape, own.dtype, own.held[:1])
    with pytest.raises(VerifyError, match="no process has 4 of 8 numbers"):
        whole([half])


def planned(folder: Path, *options: str) -> tuple[Path, Path]:
    """A step's file and a plan of it for two hosts."""
    file, plan = folder / "step.py", folder / "plan.json"
    file.write_text(FILE)
    done = run("plan", file, "--cluster", "2x2xcpu", *options, "-o", plan)
    assert done.code == 0, done.err
    return file, plan


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--processes", "2"), "add --level numerics"),
        (("--processes", "3", "--level", "numerics"), "3 processes cannot share 4 devices"),
    ],
)
def test_what_cannot_be_run_over_processes_is_told(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    file, plan = planned(tmp_path, "--method", "dp")
    done = run("verify", plan, file, *words)
    assert done.code == 2
    assert told in " ".join(done.err.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--stages", "2", "--microbatches", "2"), id="stages"),
        pytest.param(("--method", "fsdp"), id="fsdp"),
    ],
)
def test_a_plan_over_two_processes_agrees(tmp_path: Path, options: tuple[str, ...]) -> None:
    file, plan = planned(tmp_path, *options)
    done = run("verify", plan, file, "--level", "numerics", "--processes", "2", "--steps", "2")
    assert done.code == 0, done.out + done.err
    told = " ".join(done.out.split())
    assert "2 processes of this machine, each with 2 devices" in told
    assert ("none waits for another that waits for it" in told) == (options[0] == "--stages")
