"""Multilayer perceptrons in four flavours: raw dictionaries, Equinox, Flax NNX, a dataclass."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.zoo.case import (
    BATCH,
    Batch,
    Case,
    Metrics,
    Optimizer,
    classes_batch,
    make_optimizer,
    token_cross_entropy,
)

INPUTS, HIDDEN, CLASSES = 32, 64, 10


def mlp(optimizer: Optimizer) -> Case:
    """Raw JAX: nested dictionaries, relu, squared error on a one-hot target."""
    tx = make_optimizer(optimizer)

    def create_state(key: jax.Array) -> dict[str, Any]:
        sizes = [INPUTS, HIDDEN, HIDDEN, CLASSES]
        params: dict[str, dict[str, jax.Array]] = {}
        for i, (rows, columns) in enumerate(pairwise(sizes)):
            key, sub = jax.random.split(key)
            weights = jax.random.normal(sub, (rows, columns)) / jnp.sqrt(rows)
            params[f"layer{i}"] = {"w": weights, "b": jnp.zeros(columns)}
        return {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}

    def loss_fn(params: dict[str, dict[str, jax.Array]], batch: Any) -> jax.Array:
        h = batch["x"]
        for name, layer in sorted(params.items()):
            h = h @ layer["w"] + layer["b"]
            h = h if name == "layer2" else jax.nn.relu(h)
        return jnp.mean(jnp.sum((h - jax.nn.one_hot(batch["y"], CLASSES)) ** 2, axis=-1))

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": loss}

    return Case("mlp", create_state, step, classes_batch((INPUTS,), CLASSES))


class EquinoxNet(eqx.Module):
    """An Equinox module of one example, with a static activation and a layer norm."""

    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(INPUTS, HIDDEN, key=one)
        self.norm = eqx.nn.LayerNorm(HIDDEN)
        self.last = eqx.nn.Linear(HIDDEN, CLASSES, key=two)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.gelu(self.norm(self.first(x))))


def mlp_equinox(optimizer: Optimizer) -> Case:
    """Equinox: a module of one example under `vmap`, partitioned into arrays and the rest."""
    tx = make_optimizer(optimizer)
    skeleton = eqx.filter_eval_shape(EquinoxNet, jax.random.key(0))
    static = eqx.partition(skeleton, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

    def create_state(key: jax.Array) -> tuple[Any, Any]:
        params = eqx.filter(EquinoxNet(key), eqx.is_array)
        return params, tx.init(params)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        model = eqx.combine(params, static)
        return token_cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])

    def step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Metrics]:
        params, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), {"loss": loss}

    return Case("mlp_equinox", create_state, step, classes_batch((INPUTS,), CLASSES))


class NnxNet(nnx.Module):
    """A Flax NNX network with a residual layer in the middle."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.middle = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.tanh(self.first(x))
        return self.last(h + nnx.silu(self.middle(h)))


def mlp_nnx(optimizer: Optimizer) -> Case:
    """Flax NNX: split into a graph definition that stays outside and an `nnx.State`."""
    tx = make_optimizer(optimizer)
    graph = nnx.graphdef(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0))))

    def create_state(key: jax.Array) -> dict[str, Any]:
        params = nnx.state(NnxNet(nnx.Rngs(key)), nnx.Param)
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params)(batch["x"])
        return token_cross_entropy(logits, batch["y"]), logits

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["y"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return state, {"loss": loss, "accuracy": accuracy}

    return Case("mlp_nnx", create_state, step, classes_batch((INPUTS,), CLASSES))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskedState:
    """A train state that is a plain dataclass registered as a pytree."""

    weights: tuple[jax.Array, jax.Array]
    opt_state: Any
    seen: jax.Array


def masked(optimizer: Optimizer) -> Case:
    """A weighted mean of the losses: the sum of the weights stands in the denominator."""
    tx = make_optimizer(optimizer)
    length = 8

    def create_state(key: jax.Array) -> MaskedState:
        one, two = jax.random.split(key)
        init = jax.nn.initializers.lecun_normal()
        weights = (init(one, (INPUTS, HIDDEN)), init(two, (HIDDEN, CLASSES)))
        return MaskedState(weights, tx.init(weights), jnp.zeros(()))

    def loss_fn(weights: tuple[jax.Array, jax.Array], batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = jnp.tanh(batch["x"] @ weights[0]) @ weights[1]
        log_p = jax.nn.log_softmax(logits)
        losses = -jnp.take_along_axis(log_p, batch["y"][..., None], axis=-1)[..., 0]
        count = jnp.maximum(batch["mask"].sum(), 1.0)
        return (losses * batch["mask"]).sum() / count, count

    def step(state: MaskedState, batch: Any) -> tuple[MaskedState, Metrics]:
        (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.weights, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        new = replace(state, weights=weights, opt_state=opt_state, seen=state.seen + count)
        return new, {"loss": loss, "tokens": count}

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, length + 1, size=(BATCH, 1))
        return {
            "x": rng.standard_normal((BATCH, length, INPUTS), dtype=np.float32),
            "y": rng.integers(CLASSES, size=(BATCH, length), dtype=np.int32),
            "mask": (np.arange(length) < lengths).astype(np.float32),
        }

    return Case("masked", create_state, step, batch)
