"""Steps cut into microbatches give what they give on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.errors import BatchStatisticError
from tests.passes.driving import largest_error
from tests.passes.microbatch_reference import cut, rewritten
from tests.zoo import cases

ROWS, WIDTH, CLASSES = 8, 6, 5
TOLERANCE = 1e-5
Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]
Step = Callable[[Any, Batch], Any]


def params(seed: int = 0) -> Params:
    """A two-layer perceptron."""
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "first": jax.random.normal(one, (WIDTH, WIDTH)) / 2,
        "last": jax.random.normal(two, (WIDTH, CLASSES)) / 2,
    }


def batch(seed: int = 1) -> Batch:
    """Rows with labels and a mask."""
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32),
        "y": jnp.asarray(rng.integers(CLASSES, size=ROWS), jnp.int32),
        "mask": jnp.asarray(rng.random(ROWS) < 0.7, jnp.float32),
    }


def logits(weights: Params, given: Batch) -> jax.Array:
    """What the model says of each row."""
    return jnp.tanh(given["x"] @ weights["first"]) @ weights["last"]


def losses(weights: Params, given: Batch) -> jax.Array:
    """The cross entropy of each row."""
    log_p = jax.nn.log_softmax(logits(weights, given))
    return -jnp.take_along_axis(log_p, given["y"][:, None], axis=1)[:, 0]


def descent(loss: Callable[[Params, Batch], Any], has_aux: bool = False) -> Step:
    """A step of gradient descent."""

    def step(weights: Params, given: Batch) -> Any:
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(weights, given)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step


def mean_loss(weights: Params, given: Batch) -> jax.Array:
    """The mean over rows."""
    return losses(weights, given).mean()


def masked_mean(weights: Params, given: Batch) -> jax.Array:
    """The mean over rows that count."""
    mask = given["mask"]
    return (losses(weights, given) * mask).sum() / jnp.maximum(mask.sum(), 1.0)


def log_of_mean(weights: Params, given: Batch) -> jax.Array:
    """Its derivative is the inverse of the mean, which only all rows give."""
    return jnp.log(losses(weights, given).mean())


def with_decay(weights: Params, given: Batch) -> jax.Array:
    """Half of it knows nothing of the batch, and must be added once."""
    decay = sum(jnp.sum(w**2) for w in weights.values())
    return mean_loss(weights, given) + 0.1 * decay


def with_outputs(weights: Params, given: Batch) -> Any:
    """Metrics of the batch and numbers of each row."""
    out = logits(weights, given)
    aux = {
        "logits": out,
        "accuracy": jnp.mean(jnp.argmax(out, axis=-1) == given["y"]),
        "largest": out.max(),
        "any": (out > 1.0).any(),
        "all": (out > -9.0).all(),
        "rows": given["x"].shape[0],
        "columns": out.T,
    }
    return losses(weights, given).sum(), aux


def sharpness_aware(weights: Params, given: Batch) -> Any:
    """The gradient at the weights moved up along the gradient (SAM)."""
    grads = jax.grad(mean_loss)(weights, given)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    moved = jax.tree.map(lambda w, g: w + 0.05 * g / norm, weights, grads)
    loss, grads = jax.value_and_grad(mean_loss)(moved, given)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def dropout(state: Any, given: Batch) -> Any:
    """A key that is split at each step draws a mask for each row."""
    weights, key = state
    key, sub = jax.random.split(key)

    def loss(w: Params) -> jax.Array:
        keep = jax.random.bernoulli(sub, 0.8, given["x"].shape)
        return mean_loss(w, {**given, "x": jnp.where(keep, given["x"] / 0.8, 0.0)})

    value, grads = jax.value_and_grad(loss)(weights)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), key), value


def balance(weights: Params, given: Batch) -> jax.Array:
    """A mixture's balance loss: the product of two means over the batch."""
    gates = jax.nn.softmax(logits(weights, given))
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), CLASSES)
    return mean_loss(weights, given) + jnp.sum(gates.mean(0) * chosen.mean(0))


def clipped(weights: Params, given: Batch) -> Any:
    """The gradient cut to a norm, and left out where it is not finite."""
    loss, grads = jax.value_and_grad(mean_loss)(weights, given)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    scale = jnp.minimum(1.0, 0.1 / norm)
    new = jax.tree.map(lambda w, g: w - scale * g, weights, grads)
    finite = jnp.isfinite(loss)
    return lax.cond(finite, lambda: new, lambda: weights), (loss, norm)


def tied(weights: Params, given: Batch) -> jax.Array:
    """A table of rows read by label and multiplied with."""
    table = weights["first"]
    h = jnp.tanh(given["x"] + table[given["y"]])
    return jax.nn.logsumexp(h @ table.T, axis=-1).mean()


def over_layers(weights: Params, given: Batch) -> jax.Array:
    """Layers of one weight stack, run by a scan that is differentiated."""
    stack = jnp.stack([weights["first"], weights["first"] * 0.5, weights["first"] + 0.1])

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(h @ w), jnp.mean(w)

    h, _ = lax.scan(layer, given["x"], stack)
    return mean_loss(weights, {**given, "x": h})


def shared_layers(weights: Params, given: Batch) -> jax.Array:
    """One weight for every trip, so that the scan carries its gradient."""

    def trip(_: int, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ weights["first"])

    return mean_loss(weights, {**given, "x": lax.fori_loop(0, 3, trip, given["x"])})


def every_other(state: Any, given: Batch) -> Any:
    """A step that is taken every other time, by a counter in the state."""
    weights, count = state
    loss, grads = jax.value_and_grad(mean_loss)(weights, given)
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    return (lax.cond(count % 2 == 0, lambda: moved, lambda: weights), count + 1), loss


def private(weights: Params, given: Batch) -> Any:
    """The gradient of each row, cut to a norm before they are added up (DP-SGD)."""

    def one(x: jax.Array, y: jax.Array) -> Params:
        return jax.grad(mean_loss)(weights, {"x": x[None], "y": y[None]})

    grads = jax.vmap(one)(given["x"], given["y"])
    norms = jnp.sqrt(sum(jnp.sum(g**2, axis=(1, 2)) for g in grads.values()))
    scale = jnp.minimum(1.0, 0.5 / norms)
    mean = jax.tree.map(lambda g: jnp.einsum("b,bij->ij", scale, g) / ROWS, grads)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, mean), norms


def standardized(weights: Params, given: Batch) -> jax.Array:
    """Inputs brought to mean 0 and deviation 1: statistics of the batch, not of the model."""
    x = given["x"]
    return mean_loss(weights, {**given, "x": (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)})


def two_views(weights: Params, given: Batch) -> jax.Array:
    """Both views of each row go through the model as one batch of twice as many."""
    rows = given["x"].shape[0]
    both = jnp.concatenate([given["x"], given["x"] * 0.9 + 0.1])
    h = logits(weights, {**given, "x": both})
    return jnp.mean((h[:rows] - h[rows:]) ** 2)


def time_major(weights: Params, given: Batch) -> jax.Array:
    """Rows stand second, and are merged with the time before them."""
    x = jnp.stack([given["x"], given["x"] + 1.0, given["x"] * 2.0])
    flat = jax.nn.relu(x.reshape(-1, WIDTH) @ weights["first"]) @ weights["last"]
    return jnp.mean(flat.reshape(3, -1, CLASSES) ** 2)


def turned(weights: Params, given: Batch) -> Any:
    """Results whose items are read dim by dim the other way round, so that rows come last."""
    found = logits(weights, given)
    flat = lax.reshape(found, (found.size,), (1, 0))
    return mean_loss(weights, given), (flat, lax.reshape(found, found.shape[::-1], (1, 0)))


def adversaries(state: Any, given: Batch) -> Any:
    """One model moves, then the other against what the first has become."""
    one, other = state

    def loss(a: Params, b: Params) -> jax.Array:
        return mean_loss(a, {**given, "x": logits(b, given) @ b["last"].T})

    one = jax.tree.map(lambda w, g: w - 0.1 * g, one, jax.grad(loss)(one, other))
    other = jax.tree.map(
        lambda w, g: w + 0.1 * g, other, jax.grad(lambda b, a: loss(a, b))(other, one)
    )
    return (one, other), loss(one, other)


def narrow(weights: Params, given: Batch) -> Any:
    """Everything in bfloat16, to see in what sums are held."""
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    grads = jax.grad(mean_loss)(low, {**given, "x": given["x"].astype(jnp.bfloat16)})
    return jax.tree.map(lambda w, g: w - 0.1 * g.astype(jnp.float32), weights, grads)


def statistics_of_layers(weights: Params, given: Batch) -> Any:
    """A scan that adds up a loss of each layer, and stacks sums and maxima over rows."""

    def layer(held: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        h, penalty = held
        h = jnp.tanh(h @ weights["first"])
        seen = h.sum(axis=0), lax.stop_gradient(h).max(axis=0)
        return (h, penalty + 0.1 * jnp.mean(h**2)), seen

    (h, penalty), seen = lax.scan(layer, (given["x"], jnp.zeros(())), None, length=3)
    return mean_loss(weights, {**given, "x": h}) + penalty, seen


def warmed_up(state: Any, given: Batch) -> Any:
    """A part of the loss that a counter turns on, and a loop of as many rounds as it says."""
    weights, count = state

    def loss(w: Params) -> jax.Array:
        out = lax.stop_gradient(logits(w, given))
        out = lax.while_loop(
            lambda held: held[0] < count, lambda held: (held[0] + 1, held[1] * 0.5), (0, out)
        )[1]
        extra = lax.cond(count > 2, lambda h: (h**2).mean(), lambda _: jnp.zeros(()), given["x"])
        return mean_loss(w, given) * (1.0 + extra) + out.sum()

    value, grads = jax.value_and_grad(loss)(weights)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), count + 1), value


def goes_on(h: jax.Array) -> jax.Array:
    """True of the rows that are still far from zero."""
    return jnp.abs(h).sum(-1) > 1.0


def settle(weights: Params, given: Batch, first: Any = goes_on) -> tuple[Any, jax.Array]:
    """Halve the rows that go on, as equinox loops: the test asks all rows again, and counts."""

    def test(held: Any) -> jax.Array:
        trips, _, h = held
        return goes_on(h).any() & (trips < 3)

    def trip(held: Any) -> Any:
        trips, on, h = held
        new = 0.5 * h + lax.stop_gradient(0.01 * weights["last"][0])
        return trips + 1, on & goes_on(new), jnp.where(on[:, None], new, h)

    start = lax.stop_gradient(3.0 * logits(weights, given))
    trips, _, h = lax.while_loop(test, trip, (0, first(start), start))
    return trips, h


def settled(weights: Params, given: Batch) -> Any:
    """Rows that leave a loop one by one."""
    return mean_loss(weights, given) + (settle(weights, given)[1] ** 2).sum()


def onto_state(weights: Params, given: Batch) -> Any:
    """Rows added to a parameter within the loss."""
    counts = weights["last"][0].at[given["y"]].add(1.0)
    return mean_loss(weights, given) + (counts**2).sum()


def counted(state: Any, given: Batch) -> Any:
    """State that the rows are added to where their labels say: how often, and a sum of inputs."""
    weights, seen, sums = state
    loss, grads = jax.value_and_grad(mean_loss)(weights, given)
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    seen, sums = seen.at[given["y"]].add(1), sums.at[given["y"]].add(given["x"])
    return (moved, seen, sums.at[given["y"]].subtract(0.5 * given["x"])), loss


def of_no_columns(weights: Params, given: Batch) -> jax.Array:
    """Rows with nothing in them take another shape."""
    found = logits(weights, given)
    return losses(weights, given).mean() + found[:, :0].reshape(found.shape[0], 0, 1).sum()


@dataclass(frozen=True)
class Case:
    """A step, its state, and how it must be cut."""

    step: Step
    state: Any = None
    loops: int = 1
    barrier: bool = False
    hoisted: int = 0
    rescales: int = 0
    tolerance: float = TOLERANCE


BOTH = (params(), jax.random.key(7))
CASES = {
    "mean": Case(descent(mean_loss)),
    "sum": Case(descent(lambda w, b: losses(w, b).sum())),
    "masked mean": Case(descent(masked_mean), hoisted=1),
    "log of mean": Case(descent(log_of_mean), loops=2, barrier=True, rescales=1),
    "weight decay": Case(descent(with_decay)),
    "outputs": Case(descent(with_outputs, has_aux=True)),
    "sam": Case(sharpness_aware, loops=2),
    "dropout": Case(dropout, BOTH),
    "balance": Case(descent(balance), loops=2, barrier=True),
    "clipped": Case(clipped),
    "tied": Case(descent(tied)),
    "over layers": Case(descent(over_layers)),
    "shared layers": Case(descent(shared_layers)),
    "every other": Case(every_other, (params(), jnp.int32(3))),
    "private": Case(private),
    "standardized": Case(descent(standardized), hoisted=3),
    "two views": Case(descent(two_views)),
    "time major": Case(descent(time_major)),
    "turned": Case(descent(turned, has_aux=True)),
    "adversaries": Case(adversaries, (params(1), params(2)), loops=3),
    "statistics of layers": Case(descent(statistics_of_layers, has_aux=True)),
    "settled": Case(descent(settled)),
    "onto state": Case(descent(onto_state)),
    "counted": Case(counted, (params(), jnp.arange(CLASSES), jnp.ones((CLASSES, WIDTH)))),
    "warmed up": Case(warmed_up, (params(), jnp.int32(3)), hoisted=1),
    "narrow": Case(narrow, tolerance=2e-2),
    "of no columns": Case(descent(of_no_columns)),
}


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [*((name, 4) for name in CASES), ("mean", ROWS), ("masked mean", ROWS), ("sam", 2)],
)
def test_the_cut_step_equals_the_whole(name: str, microbatches: int) -> None:
    case = CASES[name]
    state = params() if case.state is None else case.state
    step = cut(case.step, (state, batch()), microbatches)
    plan = step.batching
    hoisted = len(plan.hoist.values) if plan.hoist else 0
    found = plan.loops, plan.barrier, hoisted, len(plan.rescales)
    assert found == (case.loops, case.barrier, case.hoisted, case.rescales), str(plan)
    got, expected = step(state, batch()), jax.jit(case.step)(state, batch())
    assert largest_error(got, expected) < case.tolerance


def log_of_sums(weights: Params, given: Batch) -> jax.Array:
    """Two statistics of the batch, each a factor of its own gradients."""
    return jnp.log(losses(weights, given).mean()) + jnp.exp(logits(weights, given).mean())


def log_sharpness_aware(weights: Params, given: Batch) -> Any:
    """Two gradients one after the other, each of the log of a mean."""
    grads = jax.grad(log_of_mean)(weights, given)
    moved = jax.tree.map(lambda w, g: w + 0.05 * g, weights, grads)
    loss, grads = jax.value_and_grad(log_of_mean)(moved, given)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def log_with_dropout(state: Any, given: Batch) -> Any:
    """A mask by the number of the microbatch, under the log of a mean over scanned layers."""
    weights, key = state
    keep = jax.random.bernoulli(key, 0.8, given["x"].shape)

    def loss(w: Params) -> jax.Array:
        def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w["first"]), None

        h, _ = lax.scan(layer, jnp.where(keep, given["x"], 0.0), None, length=2)
        return jnp.log(losses(w, {**given, "x": h}).mean())

    value, grads = jax.value_and_grad(loss)(weights)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), key), value


@pytest.mark.parametrize(
    ("step", "state", "loops"),
    [
        (descent(log_of_mean), params(), 1),
        (descent(log_of_sums), params(), 1),
        (log_sharpness_aware, params(), 2),
        (log_with_dropout, BOTH, 1),
    ],
    ids=["log", "sums", "sam", "dropout"],
)
def test_factors_may_wait_for_the_end_of_the_loop(step: Step, state: Any, loops: int) -> None:
    first = cut(step, (state, batch()), 4)
    assert first.batching.rescales
    made = rewritten(first)
    found = made.batching.loops, made.batching.barrier, made.batching.rescales
    assert found == (loops, False, ()), str(made.batching)
    got, expected = made(state, batch()), jax.jit(step)(state, batch())
    assert largest_error(got, expected) < TOLERANCE


LOOPS = {"moe_switch": 2}
ZOO = [
    pytest.param(name, marks=() if name == "masked" else pytest.mark.slow)
    for name in cases("adam")
    if name != "wide_resnet_bn"
]


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_cut(name: str) -> None:
    case = cases("adam")[name]
    state, given = case.create_state(jax.random.key(0)), case.batch(1)
    made = cut(case.step, (state, given), 4)
    assert made.batching.loops == LOOPS.get(name, 1), str(made.batching)
    assert largest_error(made(state, given), jax.jit(case.step)(state, given)) < TOLERANCE


def test_batch_norm_is_refused() -> None:
    case = cases("adam")["wide_resnet_bn"]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    with pytest.raises(BatchStatisticError, match=r"the mean over rows .* \(vision\.py:"):
        cut(case.step, (state, case.batch(0)), 4)
