"""Models as plain functions of a tree of weights, with marks where a hand layout may constrain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from benchmarks.models import Batch, Metrics, Model, make_optimizer

Shapes: TypeAlias = Mapping[str, Any]  # nested; its leaves are the weights' shapes
Params: TypeAlias = Any
Mark: TypeAlias = Callable[[str, jax.Array], jax.Array]
Loss: TypeAlias = Callable[[Any, Any, "Marks"], jax.Array]


def _same(name: str, x: jax.Array) -> jax.Array:
    del name
    return x


@dataclass(frozen=True)
class Marks:
    """The calls that a model makes on its weights, where it uses them, and on its activations.

    Weights are named by their path, activations by their kind. In a plain step the marks return
    what they are given; a hand-written layout puts its constraints there.
    """

    weight: Mark = _same
    value: Mark = _same


PLAIN = Marks()


def functional(shapes: Shapes, loss_of: Loss, example: Batch) -> Model:
    """The AdamW step of a loss `(params, batch, marks)` whose weights have such shapes."""
    tx = make_optimizer("adamw")

    def apply(variables: Any, batch: Any, marks: Marks = PLAIN) -> jax.Array:
        return loss_of(variables["params"], batch, marks)

    def create_state(key: jax.Array) -> TrainState:
        new: TrainState = TrainState.create(apply_fn=apply, params=random(shapes, key), tx=tx)
        return new

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            found: jax.Array = state.apply_fn({"params": params}, batch)
            return found

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        new: TrainState = state.apply_gradients(grads=grads)
        return new, {"loss": loss}

    return Model(create_state, step, example)


class FrozenBase(TrainState):
    """A train state whose `params` are trained, and whose `base` stays as it is."""

    base: Any


def on_frozen_base(base: Shapes, shapes: Shapes, loss_of: Loss, example: Batch) -> Model:
    """The AdamW step of weights beside a frozen base, which is kept in bfloat16.

    The loss takes `{"params": ..., "base": ...}` for its weights.
    """
    tx = make_optimizer("adamw")

    def apply(variables: Any, batch: Any, marks: Marks = PLAIN) -> jax.Array:
        return loss_of(variables, batch, marks)

    def create_state(key: jax.Array) -> FrozenBase:
        kept = jax.tree.map(lambda a: a.astype(jnp.bfloat16), random(base, key))
        params = random(shapes, key)
        plain: TrainState = TrainState.create(apply_fn=apply, params=params, tx=tx)
        return FrozenBase(plain.step, apply, params, tx, plain.opt_state, base=kept)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        assert isinstance(state, FrozenBase)  # as create_state makes it

        def loss_fn(params: Any) -> jax.Array:
            found: jax.Array = state.apply_fn({"params": params, "base": state.base}, batch)
            return found

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        new: TrainState = TrainState.apply_gradients(state, grads=grads)
        return new, {"loss": loss}

    return Model(create_state, step, example)


def random(shapes: Shapes, key: jax.Array) -> Params:
    """Weights of such shapes: "scale" of ones, other vectors of zeros, matrices small at random."""
    found, tree = jax.tree_util.tree_flatten_with_path(
        dict(shapes), is_leaf=lambda x: isinstance(x, tuple)
    )
    keys = jax.random.split(key, len(found))
    leaves = []
    for (path, shape), own in zip(found, keys, strict=True):
        if path[-1].key == "scale":
            leaves.append(jnp.ones(shape))
        elif path[-1].key == "bias":
            leaves.append(jnp.zeros(shape))
        else:
            leaves.append(0.02 * jax.random.normal(own, shape))
    return jax.tree.unflatten(tree, leaves)


def stacked(layers: int, shapes: Shapes) -> Shapes:
    """The same weights for each of so many layers, as a scan takes them."""
    return {
        name: (layers, *part) if isinstance(part, tuple) else stacked(layers, part)
        for name, part in shapes.items()
    }


def dense_shapes(inputs: int, outputs: int, bias: bool = True) -> Shapes:
    """A matrix and, unless it is left out, its bias."""
    return {"kernel": (inputs, outputs), **({"bias": (outputs,)} if bias else {})}


def norm_shapes(width: int, bias: bool = True) -> Shapes:
    """The scale and, unless it is left out, the bias of a norm."""
    return {"scale": (width,), **({"bias": (width,)} if bias else {})}


def attention_shapes(width: int, bias: bool = True) -> Shapes:
    """The four matrices of attention."""
    return {n: dense_shapes(width, width, bias) for n in ("query", "key", "value", "out")}


def mlp_shapes(width: int, hidden: int) -> Shapes:
    """The two matrices around gelu."""
    return {"up": dense_shapes(width, hidden), "down": dense_shapes(hidden, width)}


def dense(params: Params, path: str, x: jax.Array, marks: Marks) -> jax.Array:
    """A matrix times activations in bfloat16, with its low-rank adapter if any, and its bias."""

    def weight(name: str) -> jax.Array:
        return marks.weight(f"{path}/{name}", params[name]).astype(x.dtype)

    y = x @ weight("kernel")
    if "narrow" in params:
        y = y + (x @ weight("narrow")) @ weight("wide")
    return y + params["bias"].astype(x.dtype) if "bias" in params else y


def normed(params: Params, x: jax.Array) -> jax.Array:
    """Layer norm, or RMS norm where there is no bias, in float32 inside."""
    wide: jax.Array = x.astype(jnp.float32)
    if "bias" in params:
        wide = plain_norm(wide) * params["scale"] + params["bias"]
    else:
        share = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        wide = wide * share * params["scale"]
    return wide.astype(x.dtype)


def plain_norm(wide: jax.Array) -> jax.Array:
    """Layer norm with no weights."""
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)


def attention(
    params: Params,
    path: str,
    x: jax.Array,
    heads: int,
    marks: Marks,
    memory: jax.Array | None = None,
    causal: bool = False,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Attention of [batch, time, width] to itself or to a memory; `bias` is [head, time, time]."""
    source = x if memory is None else memory
    b, t, width = x.shape
    q, k, v = (
        marks.value("inside", dense(params[n], f"{path}/{n}", y, marks)).reshape(
            b, y.shape[1], heads, width // heads
        )
        for n, y in (("query", x), ("key", source), ("value", source))
    )
    scores = jnp.einsum("bthc,bshc->bhts", q, k).astype(jnp.float32) * (width // heads) ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), dtype=bool)), scores, -1e30)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhts,bshc->bthc", weights, v).reshape(b, t, width)
    out = dense(params["out"], f"{path}/out", marks.value("inside", mixed), marks)
    return marks.value("projected", out)


def mlp(params: Params, path: str, x: jax.Array, marks: Marks) -> jax.Array:
    """Two matrices around gelu, or with a gate where there is one."""
    h = marks.value("inside", dense(params["up"], f"{path}/up", x, marks))
    if "gate" in params:
        gate = marks.value("inside", dense(params["gate"], f"{path}/gate", x, marks))
        h = h * jax.nn.gelu(gate)
    else:
        h = jax.nn.gelu(h)
    return marks.value("projected", dense(params["down"], f"{path}/down", h, marks))


def through_layers(
    layer: Callable[[jax.Array, Params], jax.Array], x: jax.Array, params: Params, remat: bool
) -> jax.Array:
    """The scan of a layer over stacked weights; `remat` keeps only what enters each layer."""

    def trip(x: jax.Array, own: Params) -> tuple[jax.Array, None]:
        return layer(x, own), None

    body = jax.checkpoint(trip, prevent_cse=False) if remat else trip
    return jax.lax.scan(body, x, params)[0]


def embedded(params: Params, path: str, ids: jax.Array, marks: Marks) -> jax.Array:
    """Rows of an embedding in bfloat16."""
    table = marks.weight(f"{path}/embedding", params["embedding"]).astype(jnp.bfloat16)
    return marks.value("projected", table[ids])


def next_token_loss(params: Params, x: jax.Array, targets: jax.Array, marks: Marks) -> jax.Array:
    """The mean cross entropy behind a final norm and a head."""
    x = marks.value("normed", normed(params["norm"], x))
    logits = marks.value("inside", dense(params["head"], "head", x, marks)).astype(jnp.float32)
    top = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(top - own)
