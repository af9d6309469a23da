"""What a step changes in place and does not return is lost, and refused; nothing else is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import TraceError
from autopar.frontend import StepSpec, trace
from tests.frontend.tracing import shape, traced

Tree = dict[str, Any]
STATE = {"w": shape(8, 8), "count": shape(dtype=jnp.int32)}
BATCH = {"x": shape(16, 8), "id": shape(16, dtype=jnp.int32)}


def loss_of(w: jax.Array, batch: Tree) -> jax.Array:
    return jnp.mean((batch["x"] @ w) ** 2)


def train(state: Tree, batch: Tree) -> jax.Array:
    """One step, in place."""
    loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
    state["w"] = state["w"] - 0.1 * grads
    return loss


def forgets(state: Tree, batch: Tree) -> Any:
    state["count"] += 1
    return train(state, batch)


def tells_its_norm(state: Tree, batch: Tree) -> Any:
    return train(state, batch), jnp.sum(state["w"] ** 2)


def returns_nothing(state: Tree, batch: Tree) -> None:
    train(state, batch)


def adds(state: Tree, batch: Tree) -> Any:
    new = {**state}
    loss = train(new, batch)
    state["ema"] = 0.9 * state["w"] + 0.1 * new["w"]
    return new, loss


def copies(state: Tree, batch: Tree) -> Any:
    loss = train(state, batch)
    batch["x"] = state.pop("w")
    return state, loss


def leaks(state: Tree, batch: Tree) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        state["count"] = jnp.max(w)
        return loss_of(w, batch)

    return jax.value_and_grad(loss)(state["w"])


@pytest.mark.parametrize(
    ("step", "lost"),
    [
        (forgets, ["state/count is replaced", "state/w is replaced"]),
        (tells_its_norm, ["state/w is replaced"]),
        (returns_nothing, ["state/w is replaced"]),
        (adds, ["state/ema is added"]),
        (copies, ["batch/x is replaced"]),
        (leaks, ["state/count is replaced"]),
    ],
)
def test_what_is_lost_is_refused_by_its_path(step: Callable[..., Any], lost: list[str]) -> None:
    for _ in range(2):  # also where JAX might know the trace
        with pytest.raises(TraceError, match=rf"{step.__name__} \(test_in_place.py:\d+\)") as e:
            traced(step, STATE, BATCH)
        assert [line[2:] for line in str(e.value).splitlines() if line.startswith("* ")] == lost
        assert "Return the new state" in str(e.value)


def test_a_jitted_step_is_looked_into_where_no_state_comes_back() -> None:
    with pytest.raises(TraceError, match="state/count is replaced"):
        traced(jax.jit(forgets), STATE, BATCH)
    assert traced(jax.jit(gives_back), STATE, BATCH).output_paths == ("0/count", "0/w", "1")


def gives_back(state: Tree, batch: Tree) -> Any:
    loss = train(state, batch)
    state["count"] += 1
    return state, loss


def makes_new_ones(state: Tree, batch: Tree) -> Any:
    state, loss = gives_back(state, batch)
    return jax.tree.map(lambda x: x * 1, state), loss


def prepares(state: Tree, batch: Tree) -> Any:
    batch["x"] = batch["x"] / 255
    batch["mask"] = batch["x"] > 0
    batch["is_training"] = True
    batch.pop("id")
    new = {**state}
    return new, train(new, batch) + jnp.sum(batch["mask"])


@pytest.mark.parametrize("step", [gives_back, makes_new_ones, prepares])
def test_what_is_returned_or_of_no_use_afterwards_passes(step: Callable[..., Any]) -> None:
    assert traced(step, STATE, BATCH).output_paths == ("0/count", "0/w", "1")


def test_static_arguments_may_change() -> None:
    def step(w: jax.Array, log: Any) -> jax.Array:
        log.seen = w
        return w * 2

    class Log:
        pass

    assert trace(StepSpec(step, static_argnums=(1,)), (shape(4), Log()), {}).output_paths == (
        "out",
    )


def test_equinox_steps_are_watched_too() -> None:
    eqx = pytest.importorskip("equinox")
    import autopar

    def step(state: Tree, x: jax.Array) -> jax.Array:
        state["seen"] = state["seen"] + jnp.sum(x)
        return jax.vmap(state["model"])(x)

    state = {"model": eqx.nn.Linear(8, 4, key=jax.random.key(0)), "seen": jnp.zeros(())}
    with pytest.raises(TraceError, match="state/seen is replaced"):
        autopar.plan(step, state, shape(16, 8), cluster="8xcpu")


def test_a_step_with_no_results_is_refused() -> None:
    def step(x: jax.Array) -> None:
        jnp.sum(x)

    with pytest.raises(TraceError, match=r"step \(test_in_place.py:\d+\) returns nothing"):
        traced(step, shape(4))
