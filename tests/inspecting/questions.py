"""A small train step with its plan, loaded to be questioned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.inspecting.loaded_plan import LoadedPlan, reopen
from autopar.ir.plan import Plan

State = dict[str, jax.Array]


def train_step(state: dict[str, State], batch: jax.Array) -> Any:
    """Two products, a bias whose dim is odd, and momentum."""

    def loss(params: State) -> jax.Array:
        hidden = jnp.tanh(batch @ params["up"])
        return jnp.mean((hidden @ params["down"] + params["odd"].sum()) ** 2)

    grads = jax.grad(loss)(state["params"])
    moved = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moved)
    return {"params": params, "momentum": moved}, jnp.float32(0)


def shapes(width: int = 1024, rows: int = 256) -> tuple[Any, Any]:
    """The arguments of the step."""
    leaf: Any = jax.ShapeDtypeStruct
    params = {
        "up": leaf((width, 4 * width), jnp.float32),
        "down": leaf((4 * width, width), jnp.float32),
        "odd": leaf((1000, 7), jnp.float32),
    }
    return {"params": params, "momentum": dict(params)}, leaf((rows, width), jnp.float32)


@dataclass(frozen=True)
class Asked:
    """A planned step, its plan, and the plan loaded."""

    step: Any
    plan: Plan
    loaded: LoadedPlan


def asked(fun: Callable[..., Any] = train_step, **options: Any) -> Asked:
    """The step planned for eight H100 with some options."""
    chosen: Any = {"cluster": "8xh100", "mesh": "2,4", **options}
    step = autopar.parallelize(fun, **chosen)
    plan = step.plan_for(*shapes())
    return Asked(step, plan, reopen(plan))
