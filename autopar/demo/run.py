"""The run of the demo: it compares the first steps, trains the model, and judges it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from autopar.api import ParallelStep
from autopar.demo.corpus import Corpus, Text, batches
from autopar.demo.gpt import GptConfig, create_state, eval_loss, train_step
from autopar.errors import InputError

COMPARED_STEPS = 3
_BF16_UNIT = 2.0**-8  # the relative rounding of one bfloat16 operation
_JUDGED_BATCHES = 8

Told = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """The distance of a run from the plain one: losses, and L2 distances relative to the plain."""

    loss: float
    parameters: float
    mean_gradient: float  # of Adam's running mean of the gradients, which no step size hides


@dataclass(frozen=True)
class Comparison:
    """The first steps of the parallel step, beside the plain one on the same batches.

    `reordered` is the plain step's own difference when the rows of each batch come in another
    order: the same sums in another order, so rounding and nothing else.
    """

    losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    parallel: Difference
    reordered: Difference

    @property
    def limit(self) -> Difference:
        """The largest error that counts as rounding in bfloat16.

        It is one unit, and eight where eight devices' rounded parts of each gradient are summed.
        """
        return Difference(_BF16_UNIT, _BF16_UNIT, 8 * _BF16_UNIT)

    @property
    def holds(self) -> bool:
        """True if the steps are equal to rounding."""
        found, limit = self.parallel, self.limit
        return (
            found.loss <= limit.loss
            and found.parameters <= limit.parameters
            and found.mean_gradient <= limit.mean_gradient
        )


@dataclass(frozen=True)
class Trained:
    """The state after a step of training, and the loss before it, in nats a byte."""

    step: int
    loss: float
    state: Any


def open_devices(count: int = 8) -> None:
    """Make JAX show so many virtual CPU devices; raises InputError where that is too late."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started: what is there may do
    found = len(jax.devices())
    if found != count:
        raise InputError(
            f"the demo needs {count} CPU devices, but JAX has started with {found}. Run it in a "
            "process of its own: autopar demo, or python -m autopar demo."
        )


def compare(
    step: ParallelStep[..., Any], config: GptConfig, corpus: Corpus, told: Told
) -> tuple[Any, Comparison]:
    """The parallel state after the first steps, and how it compares with the plain step's."""
    told("making the state, every leaf on its devices")
    state = step.init(partial(create_state, config=config), jax.random.key(0))
    plain = reordered = jax.device_get(state)
    plain_step = jax.jit(train_step)
    source = batches(corpus.train, 0, config.batch, config.sequence)
    losses: list[tuple[float, float, float]] = []
    for i in range(COMPARED_STEPS):
        batch = next(source)
        told("compiling the parallel step" if i == 0 else f"step {i + 1} in parallel")
        state, metrics = step(state, batch)
        told("compiling the plain step" if i == 0 else f"step {i + 1} on one device")
        plain, plain_metrics = plain_step(plain, batch)
        order = np.random.default_rng(i).permutation(config.batch)
        shuffled = {name: rows[order] for name, rows in batch.items()}
        reordered, other_metrics = plain_step(reordered, shuffled)
        three = (metrics, plain_metrics, other_metrics)
        losses.append((float(three[0]["loss"]), float(three[1]["loss"]), float(three[2]["loss"])))
    parallel, alone, other = zip(*losses, strict=True)
    return state, Comparison(
        parallel,
        alone,
        _difference((parallel, alone), state, plain),
        _difference((other, alone), reordered, plain),
    )


def train(
    step: ParallelStep[..., Any], config: GptConfig, corpus: Corpus, state: Any
) -> Iterator[Trained]:
    """The rest of the run, one step at a time, from the state that the comparison left."""
    source = batches(corpus.train, 1, config.batch, config.sequence)
    for i in range(COMPARED_STEPS, config.steps):
        state, metrics = step(state, next(source))
        yield Trained(i + 1, float(metrics["loss"]), state)


def held_out_loss(state: Any, corpus: Corpus, config: GptConfig) -> float:
    """The mean loss on windows of the held-out files, in nats a byte."""
    judge = jax.jit(eval_loss)
    source = batches(corpus.held_out, 2, config.batch, config.sequence)
    whole = jax.device_get(state)  # its leaves may lie on several submeshes
    return float(np.mean([float(judge(whole, next(source))) for _ in range(_JUDGED_BATCHES)]))


def entropy(text: Text) -> float:
    """The entropy of a text's own bytes, in nats a byte: what knowing their frequencies gives."""
    shares = np.bincount(text, minlength=256) / len(text)
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def _difference(
    losses: tuple[tuple[float, ...], tuple[float, ...]], state: Any, plain: Any
) -> Difference:
    pairs = zip(*losses, strict=True)
    return Difference(
        loss=max(abs(a - b) / abs(b) for a, b in pairs),
        parameters=_distance(state.params, plain.params),
        mean_gradient=_distance(
            optax.tree.get(state.opt_state, "mu"), optax.tree.get(plain.opt_state, "mu")
        ),
    )


def _distance(tree: Any, reference: Any) -> float:
    """The L2 distance of two trees of arrays over the length of the second."""
    leaves, others = (
        jax.tree.leaves(jax.device_get(tree)),
        jax.tree.leaves(jax.device_get(reference)),
    )
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(leaves, others, strict=True)]
    apart = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    whole = sum(float((b**2).sum()) for _, b in pairs)
    return float(np.sqrt(apart / whole))
