"""What processes cost: a step over two and four beside one process's, and the host's time in each.

Every job has the same devices in total and runs the same plans, in turn with the others; prints
JSON. The host's time is what a process's own thread works for each of its instructions, whoever
waits for whom. On one machine all processes share the cores, and the transport's threads take
theirs too: `bare_ms` is what the bare transfers of a step take there one after the other, with no
step around them.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.ir.program import Program
from autopar.runtime.bind import host_of
from autopar.runtime.shardings import bind_plan
from tests.processes.jobs import StandingJob, standing_job

DEVICES, LAYERS, MICROBATCHES, ROWS = 4, 8, 6, 32  # rows of a microbatch
ROUNDS, STEPS = 7, 10  # in turn, and of each round
SHAPES = ((1, 4), (2, 2), (4, 1))  # processes, and the devices of each
PLANS: tuple[dict[str, Any], ...] = (
    {"method": "fsdp"},
    {"stages": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"},
    {"stages": 4, "microbatches": MICROBATCHES, "schedule": "1f1b"},
)


def train(weights: Any, batch: Any) -> Any:
    """Descent of a plain perceptron."""

    def loss(weights: Any) -> Any:
        h = batch["x"]
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, slopes, strict=True)], value


def create(width: int) -> list[Any]:
    """The weights."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]


def batch_of(width: int) -> dict[str, Any]:
    """A batch."""
    x, y = np.random.default_rng(0).normal(size=(2, ROWS * MICROBATCHES, width))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


# -- in a process of a job ---------------------------------------------------------------------


class Running:
    """A step that has been compiled, and its state as it goes on."""

    def __init__(self, path: str, width: int) -> None:
        self._step = autopar.parallelize(train, plan=path)
        self._batch = batch_of(width)
        self._state = self._step.init(lambda: create(width))
        planned = self._step.planned(self._state, self._batch)
        self.program: Program = planned.program
        self.meshes = bind_plan(planned.plan)
        self.run(3)

    def run(self, count: int) -> dict[str, float]:
        """Seconds of a step, its loss read as users read it, and of the host's own work in it."""
        start, own = time.perf_counter(), 0.0
        for _ in range(count):
            began = time.thread_time()
            self._state, loss = self._step(self._state, self._batch)
            own += time.thread_time() - began
            float(loss)
        jax.block_until_ready(self._state)
        return {"step": (time.perf_counter() - start) / count, "host": own / count}


@lru_cache
def running(path: str, width: str) -> Running:
    """The step of a plan, compiled when it is first asked for."""
    return Running(path, int(width))


def steps(path: str, width: str, count: str) -> dict[str, float]:
    """Some steps of a plan."""
    found = running(path, width)
    host = host_of(found.meshes)
    return {**found.run(int(count)), "instructions": len(host.numbers(found.program))}


# -- beside the jobs ---------------------------------------------------------------------------


@dataclass
class Timings:
    """Of each round of a job: seconds of a step, and of the host an instruction, of the slowest."""

    steps: list[float]
    hosts: list[float]

    def add(self, told: Sequence[dict[str, float]]) -> None:
        """Add what the processes of a job tell of a round."""
        self.steps.append(max(t["step"] for t in told))
        self.hosts.append(max(t["host"] / t["instructions"] for t in told))


def compared(jobs: dict[tuple[int, int], StandingJob], width: int, options: Any) -> dict[str, Any]:
    """A plan in all jobs, in turn."""
    timings = {shape: Timings([], []) for shape in jobs}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        state = jax.eval_shape(lambda: create(width))
        plan = autopar.plan(train, state, batch_of(width), cluster=f"{DEVICES}xcpu", **options)
        plan.save(file.name)
        for number in range(ROUNDS):
            for shape, job in jobs.items():
                words = ("benchmarks.bench_processes:steps", file.name, str(width), str(STEPS))
                told = job.results(*words)
                if number:  # the first compiles
                    timings[shape].add(told)
    alone, *others = timings.values()
    return {
        "width": width,
        "plan": " ".join(map(str, options.values())),
        "step_ms": {_name(s): _rounded(t.steps, 1e3) for s, t in timings.items()},
        "host_us_an_instruction": {_name(s): _rounded(t.hosts, 1e6) for s, t in timings.items()},
        "over_one_process": {
            _name(s): _rounded([a / b for a, b in zip(t.steps, alone.steps, strict=True)], 1)
            for s, t in zip(list(timings)[1:], others, strict=True)
        },
    }


def _rounded(numbers: Sequence[float], scale: float) -> float:
    """The median to three digits."""
    middle = statistics.median(numbers) * scale
    return round(middle, 2 - math.floor(math.log10(middle)))


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def main() -> None:
    """Tiny layers show the host's share, wide ones the work's."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with ExitStack() as stack:
        jobs = {shape: stack.enter_context(standing_job(*shape)) for shape in SHAPES}
        for width in (16, 256, 1024):
            for options in PLANS:
                print(json.dumps(compared(jobs, width, options)), flush=True)


if __name__ == "__main__":
    main()
