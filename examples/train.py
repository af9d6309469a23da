"""A byte-level GPT in flax that learns Python's own sources, in any number of processes.

The same script runs on one host and on many: a launcher starts it once on each host.
    python examples/train.py --virtual-devices 8
    autopar plan examples/train.py --cluster 4x2xcpu --method fsdp --fallbacks 2 -o plans
    autopar launch --on slurm plans/4-hosts.json examples/train.py -- --plan plans
Stop it in any way, a kill included, and start it again: it goes on after its last checkpoint, with
other devices, other stages or another number of processes if you like.
"""

import argparse
import logging
import signal
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import autopar


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of a batch."""

    batch: int = 24  # rows, which two, three, four and six hosts can share evenly
    length: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4


FULL, TINY = Size(), Size(batch=12, length=16, width=32, heads=2, layers=2)

schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 1000, 3e-4)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


class Block(nn.Module):
    """Causal attention, then an MLP."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        attend = nn.MultiHeadDotProductAttention(self.size.heads, use_bias=False)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """Logits of the next byte."""

    size: Size

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        length, width = self.size.length, self.size.width
        x = nn.Embed(256, width)(text)
        x = x + self.param("places", nn.initializers.normal(0.02), (length, width))
        for _ in range(self.size.layers):
            x = Block(self.size)(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


def create_state(key: jax.Array, size: Size = FULL) -> dict[str, Any]:
    """Fresh parameters and optimizer state."""
    params = GPT(size).init(key, jnp.zeros((1, size.length), jnp.int32))
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}


def train_step(
    state: dict[str, Any], text: Any, size: Size = FULL
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One update on rows of text, each one byte longer than what is read of it."""

    def loss_of(params: Any) -> jax.Array:
        logits: Any = GPT(size).apply(params, text[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]))

    loss, slopes = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(slopes, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "norm": optax.tree.norm(slopes), "rate": schedule(state["step"])}
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics


def example_args(size: Size = FULL) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The arguments of `train_step` as shapes, for `autopar plan`."""
    state = jax.eval_shape(partial(create_state, size=size), jax.random.key(0))
    return state, jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32)


def corpus(limit: int = 2_000_000) -> np.ndarray:
    """The bytes of the standard library, file after file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files)[:limit], np.uint8)


class Batches:
    """Random rows of the corpus; each process reads those that its devices need, and no others.

    Batch n is the same whoever asks for it, so no position has to be saved but the step's number.
    """

    def __init__(self, step: autopar.ParallelStep[..., Any], size: Size) -> None:
        self.mine = step.rows_of(jax.process_index())["text"]
        self.text, self.size = corpus(), size

    def __getitem__(self, number: int) -> autopar.OwnRows:
        size, length = self.size, self.size.length + 1
        starts = np.random.default_rng(number).integers(len(self.text) - length, size=size.batch)
        own = [row for first, stop in self.mine for row in range(first, stop)]
        rows = [self.text[s : s + length].astype(np.int32) for s in starts[own]]
        held = np.array(rows, np.int32).reshape(len(own), length)
        return autopar.OwnRows(held, self.mine, size.batch)


def stop_requests(manager: ocp.CheckpointManager) -> Callable[[int], bool]:
    """A function of a step's number that says if the scheduler, by SIGTERM, wants an end after it.

    In a job JAX catches the signal, and all processes stop after the same step.
    """
    asked: list[int] = []
    if jax.process_count() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    return lambda number: bool(asked) or bool(manager.reached_preemption(number))


def train(step: autopar.ParallelStep[..., Any], size: Size, asked: argparse.Namespace) -> None:
    """Train from the last checkpoint, or from the start; the first process speaks for all."""
    step.plan_for(*example_args(size))
    batches, fresh = Batches(step, size), partial(create_state, jax.random.key(0), size)
    is_first = jax.process_index() == 0
    keep = ocp.CheckpointManagerOptions(save_interval_steps=asked.save_every, max_to_keep=3)
    with ocp.CheckpointManager(asked.folder.absolute(), options=keep) as manager:
        restored = step.restore(manager, step.abstract_state(fresh))
        done, state = (restored.step, restored.state) if restored else (0, step.init(fresh))
        if restored and is_first:
            print(f"going on after step {done}", flush=True)
        wants_stop = stop_requests(manager)
        begin, first = time.perf_counter(), done
        while done < asked.steps:
            state, metrics = step(state, batches[done])
            done += 1
            is_last = done == asked.steps or wants_stop(done)
            step.save(manager, done, state, force=is_last)  # once the save before is committed
            if done % asked.tell_every == 0 or is_last:  # asking waits for the devices
                told = "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
                tokens = (done - first) * size.batch * size.length
                rate = tokens / (time.perf_counter() - begin)
                if is_first:
                    print(f"step {done:4d}  {told}  {rate:,.0f} tokens/s", flush=True)
                begin, first = time.perf_counter(), done
            if is_last:
                break
    if is_first:
        print(f"step {done} of {asked.steps} is saved in {asked.folder}", flush=True)


def main() -> None:
    """Read the options, join the job, plan and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--tell-every", type=int, default=10)
    parser.add_argument("--plan", type=Path, help="a saved plan, or a folder of them")
    parser.add_argument("--cluster", help="the cluster to plan for; left out, the devices here")
    parser.add_argument("--stages", type=int, help="so many pipeline stages")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--tiny", action="store_true", help="a model that compiles in seconds")
    parser.add_argument("--virtual-devices", type=int, help="so many CPU devices a process")
    parser.add_argument("--join", help="HOST:PORT,PROCESSES,NUMBER where no launcher tells it")
    asked = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("autopar").setLevel(logging.INFO)  # what planning and compiling are at
    if asked.virtual_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", asked.virtual_devices)
    address, count, number = asked.join.split(",") if asked.join else (None, None, None)
    autopar.distributed(address, count and int(count), number and int(number))
    options = {"cluster": asked.cluster, "stages": asked.stages, "microbatches": asked.microbatches}
    if asked.plan:
        options = {"plan": asked.plan}
    given = {name: value for name, value in options.items() if value is not None}
    size = TINY if asked.tiny else FULL
    train(autopar.parallelize(partial(train_step, size=size), **given), size, asked)


if __name__ == "__main__":
    main()
