"""What a zoo case is, and the small helpers that the families share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

Optimizer = Literal["sgd", "adam"]
Batch = dict[str, np.ndarray]
Metrics = dict[str, jax.Array]

BATCH = 16


@dataclass(frozen=True)
class Case:
    """A train step for one device, with the state and the batches that it runs on."""

    name: str
    create_state: Callable[[jax.Array], Any]
    step: Callable[[Any, Any], tuple[Any, Metrics]]
    batch: Callable[[int], Batch]


def make_optimizer(name: Optimizer, eps: float = 1e-3) -> optax.GradientTransformation:
    """The optimizer of that name, at a rate where three steps in float32 stay well conditioned.

    Adam divides by |gradient| + eps, so `eps` bounds how much it can magnify rounding noise.
    """
    return optax.adam(1e-2, eps=eps) if name == "adam" else optax.sgd(0.05)


def token_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross entropy of integer `targets`, over all but the last axis of `logits`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def causal_mask(length: int) -> jax.Array:
    """A [query, key] mask that is true where a query may look."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def classes_batch(shape: tuple[int, ...], classes: int) -> Callable[[int], Batch]:
    """Batches of Gaussian inputs `x` of one example's `shape` and integer labels `y`."""

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((BATCH, *shape), dtype=np.float32)
        return {"x": x, "y": rng.integers(classes, size=BATCH, dtype=np.int32)}

    return batch


def tokens_batch(length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Batches of `tokens` and of `targets`, the same sequence one place further on."""

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        text = rng.integers(vocabulary, size=(BATCH, length + 1), dtype=np.int32)
        return {"tokens": text[:, :-1].copy(), "targets": text[:, 1:].copy()}

    return batch
