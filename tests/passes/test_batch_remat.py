"""Steps that recompute are cut as those that do not: a weight past a barrier is a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.passes.driving import largest_error
from tests.passes.microbatch_reference import cut, rewritten
from tests.passes.test_batch_steps import (
    ROWS,
    TOLERANCE,
    WIDTH,
    Batch,
    Params,
    Step,
    batch,
    descent,
    losses,
)

DEPTH = 2
Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_DOTS = jax.checkpoint_policies.dots_saveable


def stacked() -> Params:
    """A perceptron below which there are layers of a weight and a scale each."""
    keys = jax.random.split(jax.random.key(3), 4)
    return {
        "layers": jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH)) / 2,
        "scales": 1.0 + jax.random.normal(keys[1], (DEPTH, WIDTH)) / 9,
        "first": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 2,
        "last": jax.random.normal(keys[3], (WIDTH, 5)) / 2,
    }


def layer(h: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """A scale that is spread over rows and a function of a weight: the same for all rows."""
    return jnp.tanh((h * scale) @ jnp.sin(w))


def decayed(h: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """A layer whose weights' own norm is in its result: it is recomputed too."""
    return layer(h, w / jnp.sqrt(jnp.sum(w**2)), scale)


def masked(h: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """A layer with a mask that it draws by itself."""
    keep = jax.random.bernoulli(jax.random.key(5), 0.8, h.shape)
    return layer(jnp.where(keep, h, 0.0), w, scale)


def in_a_row(block: Layer) -> Callable[[Params, Batch], jax.Array]:
    """The loss of one layer after the other."""

    def loss(weights: Params, given: Batch) -> jax.Array:
        h = given["x"]
        for w, scale in zip(weights["layers"], weights["scales"], strict=True):
            h = block(h, w, scale)
        return losses(weights, {**given, "x": h}).mean()

    return loss


def scanned(block: Layer) -> Callable[[Params, Batch], jax.Array]:
    """The loss of layers that a scan runs."""

    def loss(weights: Params, given: Batch) -> jax.Array:
        def trip(h: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return block(h, *own), None

        h, _ = lax.scan(trip, given["x"], (weights["layers"], weights["scales"]))
        return losses(weights, {**given, "x": h}).mean()

    return loss


def remade(loss: Callable[[Params, Batch], jax.Array]) -> Callable[[Params, Batch], jax.Array]:
    """A loss that is recomputed as a whole, on top of what it recomputes itself."""
    return jax.checkpoint(loss)


def sharpness_aware(weights: Params, given: Batch) -> Any:
    """Two gradients through recomputed layers, the second where the first has led."""
    loss = in_a_row(jax.checkpoint(layer))
    moved = jax.tree.map(lambda w, g: w + 0.05 * g, weights, jax.grad(loss)(weights, given))
    value, grads = jax.value_and_grad(loss)(moved, given)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def with_decay(weights: Params, given: Batch) -> jax.Array:
    """A term without the batch, recomputed with one of the batch, counts once."""
    mean = in_a_row(jax.checkpoint(layer))

    @jax.checkpoint
    def total(weights: Params, given: Batch) -> jax.Array:
        return mean(weights, given) + 0.1 * jnp.sum(jnp.sin(weights["layers"]) ** 2)

    return total(weights, given)


def balance(weights: Params, given: Batch) -> jax.Array:
    """The product of two means over the batch, of recomputed gates."""

    @jax.checkpoint
    def means(h: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax((h * scale) @ w)
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), WIDTH)
        return gates.mean(0), chosen.mean(0)

    h = jnp.tanh(given["x"] @ weights["first"])
    one, other = means(h, weights["layers"][0], weights["scales"][0])
    return in_a_row(jax.checkpoint(layer))(weights, given) + jnp.sum(one * other)


def left_by_a_scan(weights: Params, given: Batch) -> jax.Array:
    """What a scan over rows makes of weights alone is a weight as well: here, of a last layer."""

    def trip(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(h @ w), lax.stop_gradient(jnp.sin(w))

    h, left = lax.scan(trip, given["x"], weights["layers"])
    return losses(weights, {**given, "x": h @ (2.0 * left.sum(0))}).mean()


def log_of_mean(weights: Params, given: Batch) -> jax.Array:
    """Its derivative passes the barrier of what is recomputed."""
    return jnp.log(remade(in_a_row(layer))(weights, given))


@dataclass(frozen=True)
class Case:
    """A step and how many loops it is cut into."""

    step: Step
    loops: int = 1
    barrier: bool = False


CASES = {
    "plain": Case(descent(in_a_row(jax.checkpoint(layer)))),
    "policy": Case(descent(in_a_row(jax.checkpoint(layer, policy=_DOTS)))),
    "merged": Case(descent(in_a_row(jax.checkpoint(layer, prevent_cse=False)))),
    "weights' norm": Case(descent(in_a_row(jax.checkpoint(decayed)))),
    "weights' norm kept": Case(descent(in_a_row(jax.checkpoint(decayed, policy=_DOTS)))),
    "mask": Case(descent(in_a_row(jax.checkpoint(masked)))),
    "scan": Case(descent(scanned(jax.checkpoint(layer)))),
    "scan with policy": Case(descent(scanned(jax.checkpoint(layer, policy=_DOTS)))),
    "scan of norms": Case(descent(scanned(jax.checkpoint(decayed, policy=_DOTS)))),
    "scan with mask": Case(descent(scanned(jax.checkpoint(masked)))),
    "whole scan": Case(descent(remade(scanned(layer)))),
    "nested": Case(descent(remade(in_a_row(jax.checkpoint(layer))))),
    "nested in a scan": Case(descent(remade(scanned(jax.checkpoint(jax.checkpoint(layer)))))),
    "decay": Case(descent(with_decay)),
    "left by a scan": Case(descent(left_by_a_scan)),
    "sam": Case(sharpness_aware, loops=2),
    "balance": Case(descent(balance), loops=2, barrier=True),
}


QUICK = ("plain", "policy", "scan with policy", "nested", "left by a scan", "sam", "balance")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_a_step_that_recomputes_is_cut(name: str) -> None:
    case, weights = CASES[name], stacked()
    made = cut(case.step, (weights, batch()), 4)
    assert (made.batching.loops, made.batching.barrier) == (case.loops, case.barrier)
    got, expected = made(weights, batch()), jax.jit(case.step)(weights, batch())
    assert largest_error(got, expected) < TOLERANCE


def test_a_factor_passes_the_barrier() -> None:
    weights = stacked()
    made = rewritten(cut(descent(log_of_mean), (weights, batch()), ROWS))
    assert (made.batching.loops, made.batching.barrier) == (1, False)
    got, expected = made(weights, batch()), jax.jit(descent(log_of_mean))(weights, batch())
    assert largest_error(got, expected) < TOLERANCE


def test_what_a_weight_is_made_into_is_no_work_of_the_loop() -> None:
    made = cut(CASES["plain"].step, (stacked(), batch()), 4).batching
    pairs = list(zip(made.graph.ops, made.moments, strict=True))
    found = [(op.origin.region, str(moment)) for op, moment in pairs if op.kind == "sin"]
    assert found == [("forward", "free")] * DEPTH + [("backward", "free")] * DEPTH
    barriers = [op for op, _ in pairs if op.kind == "optimization_barrier"]
    assert len(barriers) == DEPTH
    assert all(r.name in made.rows_of for op in barriers for r in op.results)
    assert "same" not in [a.combiner for a in made.accumulators]


def test_an_update_is_not_drawn_into_the_loop() -> None:
    made = cut(CASES["decay"].step, (stacked(), batch()), 4).batching
    pairs = zip(made.graph.ops, made.moments, strict=True)
    assert {str(m) for op, m in pairs if op.origin.region == "update"} <= {"free", "once 0"}
