"""A step whose gradients are not finite is left out alike on all devices, by any method and stages.

One row of one batch of three is infinite: one device of several, or one microbatch, sees it first.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.end_to_end.combos import METHODS
from tests.end_to_end.running import EAGER, STEPS, differing, numbers

LAYERS, EXPERTS, WIDTH, ROWS, LENGTH, BAD = 2, 4, 16, 16, 8, 1
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2, eps=1e-2)}
SHARDED: dict[str, dict[str, Any]] = {m: {"mesh": (2, 4), "method": m} for m in METHODS}
STAGED: dict[str, dict[str, Any]] = {
    "microbatches": {"mesh": (8,), "microbatches": 4},
    "stages": {"stages": 2, "microbatches": 4},
    "sharded stages": {"stages": 2, "microbatches": 4, "method": "fsdp"},
    "interleaved": {"stages": 2, "microbatches": 4, "schedule": "interleaved"},
    "zero-bubble": {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
}
LAYOUTS = SHARDED | STAGED


def create() -> Any:
    """Two layers of attention over time and of experts, each a dense mix of a few."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / WIDTH**0.5)

    def layer() -> Any:
        return {
            "qkv": some(3, WIDTH, WIDTH),
            "route": some(WIDTH, EXPERTS),
            "up": some(EXPERTS, WIDTH, 2 * WIDTH),
            "down": some(EXPERTS, 2 * WIDTH, WIDTH),
        }

    return [layer() for _ in range(LAYERS)]


def loss_of(params: Any, x: Any) -> jax.Array:
    """The mean square of what the layers make."""
    for layer in params:
        q, k, v = (x @ w for w in layer["qkv"])
        x = x + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v
        share = jax.nn.softmax(x @ layer["route"])
        h = jnp.tanh(jnp.einsum("blw,ewh->belh", x, layer["up"]))
        x = x + jnp.einsum("belh,ehw,ble->blw", h, layer["down"], share)
    return jnp.mean(x**2)


def batch_of(number: int) -> np.ndarray[Any, Any]:
    """Rows of which one, in one batch, is infinite."""
    rng = np.random.default_rng(number)
    rows = rng.standard_normal((ROWS, LENGTH, WIDTH), dtype=np.float32)
    if number == BAD:
        rows[ROWS // 2 + 1] = np.inf
    return rows


def step_with(name: str) -> tuple[Any, Any]:
    """A guarded step, and its first state."""
    optimizer = optax.apply_if_finite(OPTIMIZERS[name], max_consecutive_errors=3)

    def step(state: Any, x: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt_state = optimizer.update(slopes, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    params = create()
    return step, {"params": params, "opt_state": optimizer.init(params)}


def run(step: Any, state: Any) -> list[Any]:
    """The state after each step, on the host."""
    after: list[Any] = []
    for number in range(STEPS):
        state, _ = step(state, batch_of(number))
        after.append(numbers(state))
    return after


# A recipe's stages are found without a search.
MARKS = {("sharded stages", "sgd"): [], ("fsdp", "adam"): [pytest.mark.ci]}
CASES = [
    pytest.param(*case, marks=MARKS.get(case, [pytest.mark.slow]))
    for case in itertools.product(LAYOUTS, OPTIMIZERS)
]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_step_that_is_not_finite_is_left_out(layout: str, name: str) -> None:
    step, state = step_with(name)
    parallel = autopar.parallelize(step, cluster=EAGER, **LAYOUTS[layout])
    got, plain = run(parallel, state), run(jax.jit(step), state)
    for number, (mine, theirs) in enumerate(zip(got, plain, strict=True)):
        assert not differing(mine, theirs), number
    before, after = (dict(got[n]) for n in (BAD - 1, BAD))
    assert after["['opt_state'].total_notfinite"] == 1
    for path, leaf in after.items():
        if path.startswith("['params']"):
            assert leaf.tobytes() == before[path].tobytes(), path
    assert dict(got[-1])["['opt_state'].total_notfinite"] == 1
