"""The smallest step worth parallelizing: an MLP with Adam, in plain JAX and optax.

Plan it for a cluster that is not here:
    autopar plan examples/quickstart.py:train_step --cluster v5p:2x2x1
Train it on the devices that are:
    python examples/quickstart.py
"""

import time
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

INPUTS, HIDDEN, CLASSES, BATCH = 64, 512, 8, 128

optimizer = optax.adam(1e-3)


class State(TypedDict):
    """Weights and biases of two layers, and what Adam remembers of them."""

    params: dict[str, jax.Array]
    opt_state: Any


def create_state(key: jax.Array) -> State:
    """Fresh parameters and optimizer state."""
    one, two = jax.random.split(key)
    params = {
        "w1": jax.random.normal(one, (INPUTS, HIDDEN)) * INPUTS**-0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(two, (HIDDEN, CLASSES)) * HIDDEN**-0.5,
        "b2": jnp.zeros(CLASSES),
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def loss_fn(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    """The mean cross entropy of a two-layer network."""
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    """One update, written for one device."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    params: Any = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss}


def example_args() -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """The arguments of `train_step` as shapes: planning allocates nothing."""
    state = jax.eval_shape(create_state, jax.random.key(0))
    x = jax.ShapeDtypeStruct((BATCH, INPUTS), jnp.float32)
    return state, {"x": x, "y": jax.ShapeDtypeStruct((BATCH,), jnp.int32)}


def make_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Points labeled by the largest of their first `CLASSES` coordinates."""
    x = rng.standard_normal((BATCH, INPUTS), dtype=np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(axis=1).astype(np.int32)}


def main(steps: int = 200) -> None:
    """Parallelize the step over the local devices and train."""
    step = autopar.parallelize(train_step)
    state = step.init(create_state, jax.random.key(0))
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for i in range(steps):
        state, metrics = step(state, make_batch(rng))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {float(metrics['loss']):.4f}")
        if i == 0:  # it plans and compiles
            start = time.perf_counter()
    seconds = (time.perf_counter() - start) / max(1, steps - 1)
    print(f"{step.plan.rate(seconds)}; predicted {step.plan.rate()}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
