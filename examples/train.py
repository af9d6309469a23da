"""A byte-level GPT in flax that learns Python's own sources, in any number of processes.

The same script runs on one host and on many: a launcher starts it once on each host.
    python examples/train.py --steps 100
    autopar plan examples/train.py --cluster 2x2xcpu --method fsdp -o plan.json
    autopar launch --on slurm plan.json examples/train.py -- --plan plan.json
"""

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 16, 128, 128, 4, 4
WARMUP, DECAY = 20, 1000

schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, WARMUP, DECAY, 3e-4)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


class Block(nn.Module):
    """Causal attention, then an MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.SelfAttention(HEADS, use_bias=False)(nn.LayerNorm()(x), mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """Logits of the next byte."""

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        places = self.param("places", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(256, WIDTH)(text) + places
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


model = GPT()


def create_state(key: jax.Array) -> dict[str, Any]:
    """Fresh parameters and optimizer state."""
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}


def train_step(state: dict[str, Any], text: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One update on rows of text, each one byte longer than what is read of it."""

    def loss_of(params: Any) -> jax.Array:
        logits = model.apply(params, text[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]))

    loss, slopes = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(slopes, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "norm": optax.global_norm(slopes), "rate": schedule(state["step"])}
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics


def example_args() -> tuple[Any, jax.ShapeDtypeStruct]:
    """The arguments of `train_step` as shapes, for `autopar plan`."""
    state = jax.eval_shape(create_state, jax.random.key(0))
    return state, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)


def corpus(limit: int = 2_000_000) -> np.ndarray:
    """The bytes of the standard library, file after file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files)[:limit], np.uint8)


class Batches:
    """Random rows of the corpus; each process reads those that its devices need, and no others."""

    def __init__(self, step: autopar.ParallelStep[..., Any]) -> None:
        self.mine = step.rows_of(jax.process_index())["text"]
        self.text = corpus()

    def __getitem__(self, number: int) -> autopar.OwnRows:
        starts = np.random.default_rng(number).integers(len(self.text) - LENGTH - 1, size=BATCH)
        own = [row for first, stop in self.mine for row in range(first, stop)]
        rows = [self.text[s : s + LENGTH + 1].astype(np.int32) for s in starts[own]]
        held = np.array(rows, np.int32).reshape(len(own), LENGTH + 1)
        return autopar.OwnRows(held, self.mine, BATCH)


def main() -> None:
    """Plan, train and tell the loss; the first process speaks for all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plan", type=Path, help="a saved plan, instead of one made here")
    parser.add_argument("--cluster", help="the cluster to plan for; left out, the devices here")
    parser.add_argument("--stages", type=int, help="so many pipeline stages")
    parser.add_argument("--microbatches", type=int)
    asked = parser.parse_args()
    autopar.distributed()
    options = {"cluster": asked.cluster, "stages": asked.stages, "microbatches": asked.microbatches}
    if asked.plan:
        options = {"plan": asked.plan}
    given = {name: value for name, value in options.items() if value is not None}
    step = autopar.parallelize(train_step, **given)
    step.plan_for(*example_args())
    state, batches = step.init(create_state, jax.random.key(0)), Batches(step)
    begin = time.perf_counter()
    for number in range(asked.steps):
        state, metrics = step(state, batches[number])
        if jax.process_index() == 0 and (number % 10 == 0 or number == asked.steps - 1):
            told = "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
            rate = (number + 1) * BATCH * LENGTH / (time.perf_counter() - begin)
            print(f"step {number:4d}  {told}  {rate:,.0f} bytes/s", flush=True)


if __name__ == "__main__":
    main()
