"""A GPT in raw JAX and optax, parallelized by one call and nothing else.

The parameters are a plain dictionary, the layers are stacked and scanned, and each is
rematerialized in the backward pass. `python examples/gpt.py` trains a tiny one on 8 virtual CPU
devices to reverse a sequence, which takes attention over the whole of it. Plan one of 3.6 billion
parameters for a cluster that is not here:
    autopar plan examples/gpt.py:train_step --cluster v5p:4x4x4
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How large the model and a batch are; the code of the step asks its arguments."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int


TINY = Size(layers=4, width=64, heads=8, vocabulary=32, length=24, batch=64)
LARGE = Size(layers=16, width=4096, heads=32, vocabulary=50304, length=1024, batch=64)

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def create_state(key: jax.Array, size: Size = TINY) -> Params:
    """Fresh parameters, stacked over layers where there is one a layer, and optimizer state."""
    layers, width, heads, head = size.layers, size.width, size.heads, size.width // size.heads
    shapes = {
        "embed": (size.vocabulary, width),
        "positions": (size.length, width),
        "qkv": (layers, width, 3, heads, head),
        "out": (layers, heads, head, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "head": (width, size.vocabulary),
    }
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    params = {name: 0.05 * jax.random.normal(k, shape) for k, (name, shape) in pairs}
    return {"params": params, "opt_state": optimizer.init(params)}


def norm(x: jax.Array) -> jax.Array:
    """Root mean square norm over the features."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@jax.named_scope("attention")
def attention(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    """Causal attention of several heads."""
    q, k, v = jnp.einsum("btd,dihc->ibthc", x, qkv)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhqk,bkhc,hcd->bqd", weights, v, out)


@jax.named_scope("mlp")
def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two products with a nonlinearity between them."""
    return jax.nn.gelu(x @ up) @ down


@jax.checkpoint
def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
    """Attention and an MLP, as the body of a scan over layers."""
    x = x + attention(norm(x), layer["qkv"], layer["out"])
    return x + mlp(norm(x), layer["up"], layer["down"]), None


def loss_fn(params: Params, batch: Any) -> jax.Array:
    """The mean cross entropy of the second half, each token from those before it."""
    tokens = batch["tokens"]
    with jax.named_scope("embed"):
        x = params["embed"][tokens] + params["positions"]
    stacked = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x, _ = jax.lax.scan(block, x, stacked)
    half = tokens.shape[1] // 2
    with jax.named_scope("head"):
        logits = norm(x)[:, half - 1 : -1] @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, half:])
        return jnp.mean(losses)


def train_step(state: Params, batch: Any) -> tuple[Params, dict[str, jax.Array]]:
    """One update, written for one device."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    params: Any = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss}


def eval_loss(state: Params, batch: Any) -> jax.Array:
    """The loss on a batch, with nothing learnt from it."""
    return loss_fn(state["params"], batch)


def example_args(size: Size = LARGE) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """The arguments of `train_step` as shapes: planning allocates nothing."""
    state = jax.eval_shape(lambda key: create_state(key, size), jax.random.key(0))
    return state, {"tokens": jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)}


def tiny_args() -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """The same of the model that is trained here: `autopar plan ... --args tiny_args`."""
    return example_args(TINY)


def make_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens, and the same ones backwards."""
    first = rng.integers(TINY.vocabulary, size=(TINY.batch, TINY.length // 2), dtype=np.int32)
    return {"tokens": np.concatenate([first, first[:, ::-1]], axis=1)}


def main(steps: int = 200) -> None:
    """Parallelize the step over the local devices, train, and print the losses."""
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
    print(f"a new batch: loss {float(eval_loss(state, make_batch(rng))):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
