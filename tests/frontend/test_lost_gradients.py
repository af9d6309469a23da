"""A step whose gradients nobody gets is warned of; one that returns nothing is refused."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import TraceError
from tests.frontend.tracing import shape, traced

STATE, X = {"w": shape(8, 8)}, shape(16, 8)


def _loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def in_place(state: Any, x: Any) -> Any:
    """A step whose new state goes into the dict that it was given."""
    loss, grads = jax.value_and_grad(_loss)(state["w"], x)
    state["w"] = state["w"] - 0.1 * grads
    return loss


def returned(state: Any, x: Any) -> Any:
    return in_place(state, x), state


def norm(state: Any, x: Any) -> Any:
    return jnp.sum(jax.grad(_loss)(state["w"], x) ** 2)


def nothing(state: Any, x: Any) -> None:
    in_place(state, x)


@pytest.mark.parametrize("step", [in_place, jax.jit(in_place)])
def test_gradients_that_nobody_gets_are_warned_of(step: Any) -> None:
    with pytest.warns(UserWarning, match=r"in_place \(test_lost_gradients.py:\d+\) computes grad"):
        traced(step, STATE, X)


@pytest.mark.parametrize("step", [returned, norm, lambda state, x: _loss(state["w"], x)])
def test_other_steps_are_not(step: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(step, STATE, X)


@pytest.mark.filterwarnings("ignore:.*computes gradients")
def test_a_step_that_returns_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match=r"nothing \(test_lost_gradients.py:\d+\) returns nothing"):
        traced(nothing, STATE, X)
