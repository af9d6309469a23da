"""Two processes that share one GPU: plans over both, beside plain `jax.jit` in each; prints JSON.

`python -m benchmarks.shared_gpu [CASE...]` starts them for each case, or for every one in turn.
Stages cross by `pull` whatever NCCL there is. What needs a collective between the processes takes
NCCL 2.30 or later, which puts two ranks on a GPU where NCCL_MULTI_RANK_GPU_ENABLE=1 is set. Set
XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both fit. With JAX_PLATFORMS=cpu it runs on CPUs, with
a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np

import autopar
from benchmarks.engines import free_ports
from benchmarks.hardware import timed_steps
from examples import gpt
from tests.processes.worker import join

ON_CPU = os.environ.get("JAX_PLATFORMS") == "cpu"
LARGE = gpt.Size(layers=8, width=1024, heads=16, vocabulary=8192, length=512, batch=32)
SIZE = gpt.TINY if ON_CPU else LARGE
_STAGES: dict[str, Any] = {"stages": 2, "microbatches": 4}
CASES: dict[str, dict[str, Any]] = {
    "stages pull": {**_STAGES, "transport": "pull"},
    "stages zb-h1 pull": {**_STAGES, "schedule": "zb-h1", "transport": "pull"},
    "dp": {"mesh": (2,), "method": "dp"},
    "megatron": {"mesh": (2,), "method": "megatron"},
    "stages put": {**_STAGES, "transport": "put"},
}
# On an H200 a process took 27 s to import, to compile the plain step and to begin planning.
LIMIT_SECONDS = 300.0


def worker(number: int, port: int, name: str) -> dict[str, Any]:
    """Be one of two processes: the plain step on its device, then the case's over both."""
    if ON_CPU:
        join(number, 2, 1, port)
    else:
        autopar.distributed(f"127.0.0.1:{port}", 2, number, local_devices=(0,))
    shape = (SIZE.batch, SIZE.length)
    batch = {"tokens": np.random.default_rng(0).integers(0, 32, shape).astype(np.int32)}
    create = partial(gpt.create_state, size=SIZE)
    with jax.default_device(jax.local_devices()[0]):
        plain = jax.jit(gpt.train_step, donate_argnums=0)
        alone = timed_steps(plain, jax.jit(create)(jax.random.key(0)), batch)
    step = autopar.parallelize(gpt.train_step, **CASES[name])
    # With a plan the state is made where stages want it. Without, it is cut up over both processes,
    # and has to be gathered for the first step.
    step.plan_for(step.abstract_state(create, jax.random.key(0)), batch)
    both = timed_steps(step, step.init(create, jax.random.key(0)), batch)
    apart = np.abs(np.subtract(both["losses"], alone["losses"]))
    return {
        "case": name,
        "device": jax.local_devices()[0].device_kind,
        "cluster": step.plan.origin.cluster_name,
        "step_ms": round(both["seconds"] * 1e3, 3),
        "jit_ms": round(alone["seconds"] * 1e3, 3),
        "largest_difference_of_a_loss": float(apart.max()),
    }


def compared(name: str) -> dict[str, Any]:
    """The row of a case, or how its processes ended and what they said last."""
    words = [sys.executable, "-m", "benchmarks.shared_gpu", "--worker"]
    (port,), end, said = free_ports(1), time.monotonic() + LIMIT_SECONDS, list[str]()
    workers = [
        subprocess.Popen(
            [*words, str(n), str(port), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    for process in workers:
        try:
            said.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(f"{process.communicate()[0]}\nstopped after {LIMIT_SECONDS:.0f} s")
    codes = [process.returncode for process in workers]
    if any(codes):
        return {"case": name, "codes": codes, "said": [text[-2000:] for text in said]}
    row: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return row


def main() -> None:
    """The cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--worker", nargs=3, metavar=("NUMBER", "PORT", "CASE"))
    options = parser.parse_args()
    if options.worker:
        number, port, name = options.worker
        print(json.dumps(worker(int(number), int(port), name)), flush=True)
        return
    for name in options.cases or CASES:
        print(json.dumps(compared(name)), flush=True)


if __name__ == "__main__":
    main()
