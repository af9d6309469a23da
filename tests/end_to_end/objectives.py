"""Losses and updates as users write them, on a perceptron that is quick to cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.end_to_end.pipelines import Subject

ROWS, WIDTH, CLASSES, LAYERS = 16, 16, 10, 5

Params = dict[str, dict[str, jax.Array]]
Batch = dict[str, Any]
Loss = Callable[[Params, Batch], Any]
Step = Callable[[Any, Batch], Any]


def params(seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Layers of one shape, but for the last."""
    columns = [WIDTH] * (LAYERS - 1) + [CLASSES]
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    return {
        f"l{i}": {
            "w": (jax.random.normal(key, (WIDTH, n)) / WIDTH**0.5).astype(dtype),
            "b": jnp.zeros(n, dtype),
        }
        for i, (key, n) in enumerate(zip(keys, columns, strict=True))
    }


def batch(seed: int) -> Batch:
    """Rows with labels and a mask."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((ROWS, WIDTH), dtype=np.float32),
        "y": rng.integers(CLASSES, size=ROWS, dtype=np.int32),
        "mask": (rng.random(ROWS) < 0.7).astype(np.float32),
    }


def hidden(weights: Params, given: Batch) -> jax.Array:
    """What all layers but the last make of each row."""
    h = given["x"].astype(weights["l0"]["w"].dtype)
    for i in range(LAYERS - 1):
        h = jnp.tanh(h @ weights[f"l{i}"]["w"] + weights[f"l{i}"]["b"])
    return h


def logits(weights: Params, given: Batch) -> jax.Array:
    """What the model says of each row."""
    h = hidden(weights, given)
    return h @ weights[f"l{LAYERS - 1}"]["w"] + weights[f"l{LAYERS - 1}"]["b"]


def losses(weights: Params, given: Batch) -> jax.Array:
    """The cross entropy of each row."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, given), given["y"])


def mean_loss(weights: Params, given: Batch) -> jax.Array:
    """The mean over rows."""
    return losses(weights, given).mean()


def norm(tree: Any) -> jax.Array:
    """The norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def _adam() -> optax.GradientTransformation:
    return optax.adam(1e-2, eps=1e-3)


def trained(
    loss: Loss,
    tx: optax.GradientTransformation | None = None,
    has_aux: bool = False,
    dtype: Any = jnp.float32,
) -> Subject:
    """A loss with an optimizer, and a counter in the state."""
    update = tx or _adam()

    def step(state: Any, given: Batch) -> Any:
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(state["params"], given)
        updates, opt = update.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt": opt, "count": state["count"] + 1}, value

    weights = params(dtype=dtype)
    state = {"params": weights, "opt": update.init(weights), "count": jnp.zeros((), jnp.int32)}
    return Subject(step, state, batch)


# -- losses ----------------------------------------------------------------------------------


def _sum(weights: Params, given: Batch) -> jax.Array:
    return losses(weights, given).sum()


def _masked(weights: Params, given: Batch) -> jax.Array:
    mask = given["mask"]
    return (losses(weights, given) * mask).sum() / jnp.maximum(mask.sum(), 1.0)


def _log_of_mean(weights: Params, given: Batch) -> jax.Array:
    return jnp.log(mean_loss(weights, given))


def _in_chunks(weights: Params, given: Batch) -> jax.Array:
    """The mean loss by chunks of the classes, each made again: what they start from is constant."""
    h, labels, size = hidden(weights, given), given["y"], CLASSES // 2
    last = weights[f"l{LAYERS - 1}"]
    chunks = last["w"].T.reshape(2, size, WIDTH), last["b"].reshape(2, size), jnp.arange(2)

    @jax.checkpoint
    def add(carry: Any, chunk: Any) -> Any:
        most, total, own = carry
        kernel, bias, number = chunk
        told = h @ kernel.T + bias
        more = jnp.maximum(most, lax.stop_gradient(told.max(-1)))
        total = total * jnp.exp(most - more) + jnp.exp(told - more[:, None]).sum(-1)
        at = labels - number * size
        found = jnp.take_along_axis(told, jnp.clip(at, 0, size - 1)[:, None], -1)[:, 0]
        return (more, total, own + jnp.where((at >= 0) & (at < size), found, 0.0)), None

    zeros = jnp.zeros(labels.shape)
    (most, total, own), _ = lax.scan(add, (zeros - 1e30, zeros, zeros), chunks)
    return (most + jnp.log(total) - own).mean()


def _with_decay(weights: Params, given: Batch) -> jax.Array:
    return mean_loss(weights, given) + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(weights))


def _with_metrics(weights: Params, given: Batch) -> Any:
    said = logits(weights, given)
    each = optax.softmax_cross_entropy_with_integer_labels(said, given["y"])
    right = said.argmax(axis=-1) == given["y"]
    told = {"logits": said, "each": each, "worst": each.max(), "least": said.min()}
    return each.mean(), told | {"accuracy": right.mean(), "hits": right.sum()}


def _half_precision(weights: Params, given: Batch) -> jax.Array:
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    return mean_loss(half, given).astype(jnp.float32)


# -- steps that are more than a gradient and an update ------------------------------------------


def _sharpness_aware() -> Subject:
    def step(weights: Params, given: Batch) -> Any:
        value, grads = jax.value_and_grad(mean_loss)(weights, given)
        size = norm(grads)
        above = jax.tree.map(lambda w, g: w + 0.05 * g / (size + 1e-6), weights, grads)
        slopes = jax.grad(mean_loss)(above, given)
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, slopes), {
            "loss": value,
            "norm": size,
        }

    return Subject(step, params(), batch)


def _loss_scaling() -> Subject:
    tx = _adam()

    def step(state: Any, given: Batch) -> Any:
        scale = state["scale"]
        value, grads = jax.value_and_grad(lambda w: mean_loss(w, given) * scale)(state["params"])
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()

        def update() -> Any:
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return optax.apply_updates(state["params"], updates), opt

        new, opt = lax.cond(finite, update, lambda: (state["params"], state["opt"]))
        grown = jnp.where(finite, scale * 2, scale / 2)
        return {"params": new, "opt": opt, "scale": grown}, {"loss": value / scale, "ok": finite}

    weights = params()
    return Subject(
        step, {"params": weights, "opt": tx.init(weights), "scale": jnp.float32(2**10)}, batch
    )


def _dropout() -> Subject:
    def loss(weights: Params, given: Batch, key: jax.Array) -> jax.Array:
        h = given["x"]
        for i, sub in enumerate(jax.random.split(key, LAYERS - 1)):
            h = jnp.tanh(h @ weights[f"l{i}"]["w"])
            h = h * jax.random.bernoulli(sub, 0.8, h.shape) / 0.8
        said = h @ weights[f"l{LAYERS - 1}"]["w"]
        return optax.softmax_cross_entropy_with_integer_labels(said, given["y"]).mean()

    def step(state: Any, given: Batch) -> Any:
        key, sub = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], given, sub)
        new = jax.tree.map(lambda w, g: w - 0.05 * g, state["params"], grads)
        return {"params": new, "key": key}, value

    return Subject(step, {"params": params(), "key": jax.random.key(7)}, batch)


def _counters() -> Subject:
    def step(state: Any, given: Batch) -> Any:
        value, grads = jax.value_and_grad(mean_loss)(state["params"], given)
        new = jax.tree.map(lambda w, g: w - 0.05 * g, state["params"], grads)
        return {
            "params": new,
            "count": state["count"] + 1,
            "rows": state["rows"] + given["x"].shape[0],
            "seen": state["seen"] + given["mask"].sum().astype(jnp.int32),
            "history": state["history"].at[state["count"]].set(value),
            "fixed": state["fixed"],
        }, {"norm": norm(grads), "gradients": grads}

    zero = jnp.zeros((), jnp.int32)
    counts = {"count": zero, "rows": zero, "seen": zero}
    rest = {"history": jnp.zeros(4), "fixed": jnp.arange(5)}
    return Subject(step, {"params": params(), **counts, **rest}, batch)


def _frozen() -> Subject:
    labels = {f"l{i}": "still" if i in (0, 2) else "moving" for i in range(LAYERS)}
    both: dict[Hashable, Any] = {"moving": _adam(), "still": optax.set_to_zero()}
    return trained(mean_loss, optax.multi_transform(both, labels))


def _teacher() -> Subject:
    """Its targets are those of a slow copy of the weights, through which no gradient flows."""

    def step(state: Any, given: Batch) -> Any:
        def loss(weights: Params) -> jax.Array:
            wanted = lax.stop_gradient(logits(state["slow"], given))
            return ((logits(weights, given) - wanted) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        new = jax.tree.map(lambda w, g: w - 0.05 * g, state["params"], grads)
        slow = jax.tree.map(lambda s, w: 0.9 * s + 0.1 * w, state["slow"], new)
        return {"params": new, "slow": slow}, value

    return Subject(step, {"params": params(), "slow": params(1)}, batch)


def stacked() -> Subject:
    """Layers that are rows of one array, run by a scan: stages share a leaf of the state."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), _adam())

    def loss(weights: Any, given: Batch) -> jax.Array:
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), given["x"], weights["stack"])[0]
        said = h @ weights["head"]
        return optax.softmax_cross_entropy_with_integer_labels(said, given["y"]).mean()

    def step(state: Any, given: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], given)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    made = params()
    weights = {
        "stack": jnp.stack([made[f"l{i}"]["w"] for i in range(LAYERS - 1)]),
        "head": made[f"l{LAYERS - 1}"]["w"],
    }
    return Subject(step, {"params": weights, "opt": tx.init(weights)}, batch)


def subjects() -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Every step by name, in float32."""
    yield "mean", lambda: trained(mean_loss)
    yield "sum", lambda: trained(_sum, optax.sgd(0.01))
    yield "masked-mean", lambda: trained(_masked)
    yield "log-of-mean", lambda: trained(_log_of_mean)
    yield "chunks", lambda: trained(_in_chunks)
    yield "decay", lambda: trained(_with_decay)
    yield "metrics", lambda: trained(_with_metrics, has_aux=True)
    yield "sam", _sharpness_aware
    yield "dropout", _dropout
    yield "clip", lambda: trained(mean_loss, optax.chain(optax.clip_by_global_norm(0.1), _adam()))
    every_other = optax.MultiSteps(_adam(), 2).gradient_transformation()
    yield "multi-steps", lambda: trained(mean_loss, every_other)
    yield "if-finite", lambda: trained(mean_loss, optax.apply_if_finite(_adam(), 3))
    yield "loss-scaling", _loss_scaling
    yield "frozen", _frozen
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    yield "schedule", lambda: trained(mean_loss, optax.adamw(rate, eps=1e-3, weight_decay=0.1))
    yield "lamb", lambda: trained(mean_loss, optax.lamb(1e-2, eps=1e-3))
    yield "counters", _counters
    yield "teacher", _teacher
    yield "stacked", stacked


def half_precision() -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Steps whose gradients are in bfloat16."""
    yield "weights", lambda: trained(mean_loss, optax.sgd(0.05), dtype=jnp.bfloat16)
    yield "gradients", lambda: trained(_half_precision, optax.sgd(0.05))
