"""The host's time of a step in stages, as many programs and as one, beside plain jit's.

    python -m benchmarks.bench_lowerings [stages microbatches ...]

Prints JSON, a line for each case. Both run in one process, in turn, and so does plain `jax.jit` of
the step, its rows over all devices: less than that no call takes. Each figure is the least of
several steps, each waited for. `calling` is the CPU time of the thread that calls the step, `step`
the time until it is done. `in_jax` is what of `calling` passes in JAX's own calls, in steps of
their own: of programs, of transfers, to lay out the batch, and to make an array of each leaf that
lies on one stage. That of a list of instructions grows with stages and microbatches, that of one
program does not. The GPT has a layer for each stage, and four rows in each microbatch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.runtime import cells
from benchmarks.bench_processes import Stopwatch, in_jax
from examples import gpt

ROUNDS, STEPS = 3, 5
CASES = ((4, 16), (4, 64), (8, 64))


def main(cases: Sequence[tuple[int, int]] = CASES) -> None:
    """Measures both in each case, and prints what they take and how they compare."""
    watch = _watch()
    for stages, microbatches in cases:
        print(json.dumps(compared(stages, microbatches, watch)), flush=True)


def _watch() -> Stopwatch:
    """The watch over what a step calls of JAX, to make arrays out of cells too."""
    watch = in_jax()
    of_cells: Any = cells
    of_cells.assembler = watch.giving(of_cells.assembler)
    of_cells.local_pieces = watch.timed(of_cells.local_pieces)
    return watch


def compared(stages: int, microbatches: int, watch: Stopwatch) -> dict[str, Any]:
    """The least that a step takes in each way, in milliseconds."""
    size = replace(gpt.TINY, layers=stages, batch=4 * microbatches)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(size.vocabulary, size=(size.batch, size.length), dtype=np.int32)
    }
    steps: dict[str, Any] = {h: _step(stages, microbatches, h) for h in ("mpmd", "spmd")}
    key = jax.random.key(0)
    states = {h: step.init(partial(gpt.create_state, size=size), key) for h, step in steps.items()}
    steps["jit"], states["jit"] = _plain(batch, size)
    kinds = ("calling", "in_jax", "step")
    told: dict[str, dict[str, list[float]]] = {h: {k: [] for k in kinds} for h in steps}
    losses: dict[str, list[float]] = {how: [] for how in steps}
    for _ in range(ROUNDS):
        for how, step in steps.items():
            for number in range(2 * STEPS):
                watch.is_on, watch.seconds = number >= STEPS, 0.0
                begun, own = time.perf_counter(), time.thread_time()
                states[how], metrics = step(states[how], batch)
                calling = time.thread_time() - own
                jax.block_until_ready(metrics)
                taken = time.perf_counter() - begun
                if watch.is_on:
                    told[how]["in_jax"].append(watch.seconds)
                else:
                    told[how]["calling"].append(calling)
                    told[how]["step"].append(taken)
                losses[how].append(float(jax.tree.leaves(metrics)[0]))
            watch.is_on = False
    least = {how: {k: _rounded(min(v[1:])) for k, v in own.items()} for how, own in told.items()}
    del least["jit"]["in_jax"]  # all of it
    gap = np.abs(np.subtract(losses["mpmd"], losses["spmd"])).max()
    return {
        "stages": stages,
        "microbatches": microbatches,
        "milliseconds": least,
        "times_less": {k: round(least["mpmd"][k] / least["spmd"][k], 1) for k in kinds},
        "over_plain_jit": round(least["spmd"]["calling"] / least["jit"]["calling"], 2),
        "largest_difference_of_a_loss": float(gap),
    }


def _rounded(seconds: float) -> float:
    """Milliseconds to three digits."""
    return float(f"{seconds * 1e3:.3g}")


def _step(stages: int, microbatches: int, how: str) -> autopar.ParallelStep[..., Any]:
    search = f"stages={stages},microbatches={microbatches},schedule=1f1b"
    passes = f"batch=exact,layer=min-cut,stage=search{{{search}}},shard,lower={how}"
    return autopar.parallelize(gpt.train_step, cluster="8xcpu", passes=passes)


def _plain(batch: Any, size: gpt.Size) -> tuple[Any, Any]:
    """The step under plain jit, and its state, whole on every device."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put(gpt.create_state(jax.random.key(0), size), whole)
    rows = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("data")), batch)
    step = jax.jit(
        gpt.train_step, donate_argnums=0, in_shardings=(whole, rows), out_shardings=whole
    )
    return step, state


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    given = list(map(int, sys.argv[1:]))
    main(list(zip(given[::2], given[1::2], strict=True)) or CASES)
