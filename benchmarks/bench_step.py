"""The step that autopar runs against GSPMD given the same shardings, in turn; prints JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.runtime.bind import bind_mesh, partition_spec

ROUNDS = 30


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call, results waited for."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def compared(name: str, method: str) -> dict[str, Any]:
    """Median seconds of both sides, taken alternately on the same state and batch."""
    from tests.zoo import cases

    case = cases("sgd")[name]
    step = autopar.parallelize(case.step, cluster="8xcpu", mesh=(2, 4), method=method, donate=False)
    batch = case.batch(0)
    state = step.init(case.create_state, jax.random.key(0))
    step(state, batch)
    mesh: Mesh = bind_mesh(step.plan.mesh, range(8))
    specs = [NamedSharding(mesh, partition_spec(a.sharding)) for a in step.plan.arguments]
    outs = [NamedSharding(mesh, partition_spec(a.sharding)) for a in step.plan.outputs]
    leaves, tree = jax.tree.flatten((state, batch))
    placed = [jax.device_put(x, s) for x, s in zip(leaves, specs, strict=False)]
    result = jax.tree.structure(jax.eval_shape(case.step, state, batch))
    gspmd = jax.jit(case.step, out_shardings=jax.tree.unflatten(result, outs))
    args = jax.tree.unflatten(tree, placed)
    jax.block_until_ready(gspmd(*args))
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        ours.append(timed(lambda: step(*args)))
        theirs.append(timed(lambda: gspmd(*args)))
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "case": name,
        "method": method,
        "autopar_seconds": mine,
        "gspmd_seconds": other,
        "ratio": round(mine / other, 3),
    }


def main() -> None:
    """A GPT and a mixture of experts under several methods."""
    jax.config.update("jax_num_cpu_devices", 8)
    for name, method in (("gpt", "auto"), ("gpt", "fsdp"), ("gpt", "megatron"), ("moe", "auto")):
        print(json.dumps(compared(name, method)), flush=True)


if __name__ == "__main__":
    main()
