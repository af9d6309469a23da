"""Steps whose plans are changed: one program, loops, stages, microbatches, recomputation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.ir.plan_file import plan_to_json

FILE = """
from tests.hostile.steps import {name} as train_step, shapes_of


def example_args():
    return shapes_of("{name}")
"""


def mlp(params: Any, batch: jax.Array) -> Any:
    """Two layers, and plain gradient descent."""

    def loss(w: Any) -> jax.Array:
        h = batch
        for i in range(2):
            h = jnp.tanh(h @ w[f"l{i}"]["k"] + w[f"l{i}"]["b"])
        return jnp.mean((h @ w["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, d: w - 0.1 * d, params, grads), value


def looped(params: Any, batch: jax.Array) -> Any:
    """A scan over layers with remat, a while, a cond, a softmax, a gather, Adam's moments."""

    def loss(w: Any) -> jax.Array:
        @jax.checkpoint
        def layer(h: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.softmax(h @ k) + h, None

        h, _ = jax.lax.scan(layer, batch, w["stack"])
        h = jax.lax.cond(jnp.sum(h) > 0, jnp.tanh, jnp.sin, h)
        return jnp.mean(jnp.max(h @ w["out"], axis=1) ** 2)

    grads = jax.grad(loss)(params["w"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, params["m"], grads)
    _, scale = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, jnp.float32(1.0))
    )
    weights = jax.tree.map(lambda w, m: w - 0.1 * scale * m, params["w"], moments)
    return {"w": weights, "m": moments}, scale


def shapes_of(name: str) -> tuple[Any, ...]:
    """The arguments that a step is planned for."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    if name == "mlp":
        layers = {f"l{i}": {"k": floats(32, 32), "b": floats(32)} for i in range(2)}
        return {**layers, "out": floats(32, 8)}, floats(16, 32)
    weights = {"stack": floats(3, 16, 16), "out": floats(16, 32)}
    return {"w": weights, "m": weights}, floats(16, 16)


@dataclass(frozen=True)
class Base:
    """A step, what it is called with, what it gives under plain jit, and its plan as data."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    plain: Any
    data: dict[str, Any]

    def fresh(self) -> tuple[Any, ...]:
        """The arguments again: a step takes over those of its state."""
        return tuple(jax.tree.map(jnp.asarray, a) for a in self.args)


def bases() -> dict[str, Base]:
    """A plan of each kind."""
    return {
        "one": _base(mlp, mesh=(2, 4), method="fsdp+tp"),
        "looped": _base(looped, mesh=(2, 4)),
        "stages": _base(mlp, stages=2, microbatches=4, schedule="1f1b"),
        "microbatches": _base(mlp, mesh=(8,), microbatches=4),
        "pinned": _base(looped, mesh=(8,), method="fsdp", pins={"**/out": ("data",)}),
    }


def _base(step: Callable[..., Any], **options: Any) -> Base:
    rng = np.random.default_rng(0)
    shapes = shapes_of(step.__name__)
    args = jax.tree.map(lambda s: (rng.standard_normal(s.shape) * 0.2).astype(s.dtype), shapes)
    plan = autopar.plan(step, *shapes, cluster="8xcpu", **options)
    plain = jax.device_get(jax.jit(step)(*args))
    return Base(step.__name__, step, args, plain, json.loads(plan_to_json(plan)))


def difference(found: Any, wanted: Any) -> float:
    """How far two results are apart, beside the largest number of each array."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if one.shape != other.shape or not np.isfinite(one).all():
            return float("inf")
        worst = max(worst, float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-6)))
    return worst
