"""A parallel step has the types of the plain one: mypy and pyright read this file as they lint."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.api.calls import batch_of

State = dict[str, jax.Array]


def step(
    state: State, batch: np.ndarray[Any, Any], *, rate: float = 0.1
) -> tuple[State, jax.Array]:
    """A step with types of its own."""
    return jax.tree.map(lambda w: w - rate * batch.sum(), state), batch.sum()


@autopar.parallelize(cluster="8xcpu", mesh=(8,))
def decorated(state: State, batch: np.ndarray[Any, Any]) -> State:
    """A step under the decorator."""
    return step(state, batch)[0]


def test_its_signature_is_kept() -> None:
    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=(8,))
    state, loss = parallel({"w": jnp.ones(8)}, batch_of(), rate=0.5)
    assert_type(state, State)
    assert_type(loss, jax.Array)
    assert_type(decorated({"w": jnp.ones(8)}, batch_of()), State)
    again = autopar.parallelize(parallel, mesh=(8,)).under(parallel.plan)
    assert_type(again(state, batch_of(), rate=0.5)[1], jax.Array)


def wrong_calls(state: State) -> None:
    """Calls that neither checker lets pass; nobody runs them."""
    decorated(state)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    decorated(state, "text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    autopar.parallelize(step, mehs=8)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
