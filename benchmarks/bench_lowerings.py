"""The host's time of a step in stages, as many programs and as one, beside plain jit's.

    python -m benchmarks.bench_lowerings [stages] [microbatches]

Prints JSON. Both run in one process, in turn, and so does plain `jax.jit` of the step, its rows
over all devices: less than that no call takes. Each figure is the least of several steps, each
waited for. `calling` is the CPU time of the thread that calls the step, `step` the time until it is
done. `call of the one program` is what of it JAX takes to call a program with its arguments: one
that adds a number to each. The rest lays out the batch, and makes an array of each leaf.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.planner.planned import Planned
from autopar.runtime.executor import Executor
from autopar.runtime.shardings import bind_plan
from examples import gpt

ROUNDS, STEPS = 4, 5


def main(stages: int = 4, microbatches: int = 16) -> None:
    """Measures both, and prints what they take and how they compare."""
    batch = gpt.make_batch(np.random.default_rng(0))
    steps: dict[str, Any] = {h: _step(stages, microbatches, h) for h in ("mpmd", "spmd")}
    states = {how: step.init(gpt.create_state, jax.random.key(0)) for how, step in steps.items()}
    steps["jit"], states["jit"] = _plain(batch)
    told: dict[str, dict[str, list[float]]] = {h: {"calling": [], "step": []} for h in steps}
    losses: dict[str, list[float]] = {how: [] for how in steps}
    for _ in range(ROUNDS):
        for how, step in steps.items():
            for _ in range(STEPS):
                begun, own = time.perf_counter(), time.thread_time()
                states[how], metrics = step(states[how], batch)
                told[how]["calling"].append(time.thread_time() - own)
                jax.block_until_ready(metrics)
                told[how]["step"].append(time.perf_counter() - begun)
                losses[how].append(float(jax.tree.leaves(metrics)[0]))
    least = {how: {k: min(v[1:]) * 1e3 for k, v in kinds.items()} for how, kinds in told.items()}
    gap = np.abs(np.subtract(losses["mpmd"], losses["spmd"])).max()
    result: dict[str, Any] = {
        "stages": stages,
        "microbatches": microbatches,
        "milliseconds": least,
        "times less": {k: least["mpmd"][k] / least["spmd"][k] for k in ("calling", "step")},
        "call of the one program": _bare_call(steps["spmd"].planned(states["spmd"], batch)) * 1e3,
        "over plain jit": least["spmd"]["calling"] / least["jit"]["calling"],
        "largest difference of a loss": float(gap),
    }
    print(json.dumps(result, indent=1))


def _step(stages: int, microbatches: int, how: str) -> autopar.ParallelStep[..., Any]:
    search = f"stages={stages},microbatches={microbatches},schedule=1f1b"
    passes = f"batch=exact,layer=min-cut,stage=search{{{search}}},shard,lower={how}"
    step = autopar.parallelize(gpt.train_step, cluster="8xcpu", passes=passes)
    return step


def _bare_call(planned: Planned) -> float:
    """Seconds of a call with the arguments of the one program, which does nothing else."""
    meshes = bind_plan(planned.plan)
    (program,) = Executor(planned.trace, planned.programs.lowered, meshes).compiled.values()
    infos, shardings = jax.tree.leaves(program.args_info), jax.tree.leaves(program.input_shardings)
    pairs = list(zip(infos, shardings, strict=True))
    given = [jax.device_put(np.zeros(info.shape, info.dtype), s) for info, s in pairs]
    call = jax.jit(lambda *own: [a + 1 for a in own], out_shardings=shardings)
    taken: list[float] = []
    for _ in range(ROUNDS * STEPS):
        own = time.thread_time()
        made = call(*given)
        taken.append(time.thread_time() - own)
        jax.block_until_ready(made)
    return min(taken[1:])


def _plain(batch: Any) -> tuple[Any, Any]:
    """The step under plain jit, and its state, whole on every device."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put(gpt.create_state(jax.random.key(0)), whole)
    rows = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("data")), batch)
    step = jax.jit(
        gpt.train_step, donate_argnums=0, in_shardings=(whole, rows), out_shardings=whole
    )
    return step, state


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(*map(int, sys.argv[1:3]))
