"""What stage programs cost: host time an instruction, step time, bubbles; prints JSON.

On virtual CPU devices every submesh shares the same cores, so that what one computes delays the
others: the time of a step shows overhead, and the bubble is that of the measured task times.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.planner.planned import Planned
from autopar.runtime.bind import bind_mesh
from autopar.runtime.executor import Executor
from autopar.runtime.timeline import Timeline
from autopar.schedule.grid import Grid
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.table import make_grid

ROUNDS, LAYERS, MICROBATCHES = 30, 8, 6


def step(weights: Any, batch: Any) -> Any:
    """Descent of a plain perceptron."""

    def loss(weights: Any) -> Any:
        h = batch["x"]
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, slopes, strict=True)], value


def arguments(width: int) -> tuple[Any, Any]:
    """Weights, and a batch of 16 rows a microbatch and device."""
    rng = np.random.default_rng(0)
    weights = list(rng.normal(size=(LAYERS, width, width)).astype(np.float32) / width**0.5)
    x, y = rng.normal(size=(2, 32 * MICROBATCHES, width)).astype(np.float32)
    return weights, {"x": x, "y": y}


@dataclass(frozen=True)
class Timing:
    """Median seconds of a call: until it returns, of them the thread's own, until all is done."""

    call: float
    host: float
    step: float


def timed(run: Callable[[Any, Any], Any], state: Any, batch: Any) -> tuple[Timing, Any]:
    """How long a step takes, and the state after many."""
    taken: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        start, own = time.perf_counter(), time.thread_time()
        state, value = run(state, batch)
        call, host = time.perf_counter() - start, time.thread_time() - own
        jax.block_until_ready((state, value))
        taken.append((call, host, time.perf_counter() - start))
    return Timing(*map(statistics.median, zip(*taken, strict=True))), state


def executor(planned: Planned) -> Executor:
    """The stage programs of a plan on this process's devices."""
    meshes = [bind_mesh(s.mesh, s.devices) for s in planned.plan.submeshes]
    return Executor(planned.trace, planned.program, meshes)


def compared(width: int, stages: int, schedule: str) -> dict[str, Any]:
    """The step in stages against the same step as one program, on the same eight devices."""
    weights, batch = arguments(width)
    one = autopar.parallelize(step, cluster="8xcpu")
    single, _ = timed(one, one(weights, batch)[0], batch)
    planned = autopar.parallelize(
        step, cluster="8xcpu", stages=stages, microbatches=MICROBATCHES, schedule=schedule
    ).planned(weights, batch)
    run, program = executor(planned), planned.program
    staged, state = timed(lambda state, batch: run(jax.tree.leaves((state, batch))), weights, batch)
    _, timeline = run.run_traced(jax.tree.leaves((state, batch)))
    kinds = Counter(type(i).__name__.lower() for i in program.instructions)
    return {
        "width": width,
        "stages": stages,
        "schedule": schedule,
        "instructions": dict(kinds),
        "host_us_an_instruction": round(staged.host / len(program.instructions) * 1e6, 1),
        "host_us_a_run_or_send": round(staged.host / (kinds["run"] + kinds["send"]) * 1e6, 1),
        "call_ms": round(staged.call * 1e3, 2),
        "step_ms": round(staged.step * 1e3, 2),
        "one_program_ms": round(single.step * 1e3, 2),
        "compiled": str(run.compile_report),
        **bubbles(timeline.loop, make_grid(schedule, stages, MICROBATCHES)),
    }


def bubbles(measured: Timeline, grid: Grid) -> dict[str, Any]:
    """The idle part of all submeshes' time: as measured, and simulated from the tasks' times."""
    simulation = simulate(grid, stage_times(measured, grid.stage_count))
    idle = sum(simulation.makespan_bubbles) / grid.device_count / simulation.makespan_seconds
    return {
        "measured_bubble": round(measured.bubble_fraction, 3),
        "simulated_bubble": round(idle, 3),
        "measured_makespan_ms": round(measured.makespan_seconds * 1e3, 2),
        "simulated_makespan_ms": round(simulation.makespan_seconds * 1e3, 2),
    }


def stage_times(measured: Timeline, stages: int) -> StageTimes:
    """The median time of each stage's tasks; a whole backward counts as the input's gradient."""

    def seconds(*kinds: str) -> tuple[float, ...]:
        return tuple(
            statistics.median(
                [s.seconds for s in measured.spans if s.kind in kinds and s.stage == stage] or [0.0]
            )
            for stage in range(stages)
        )

    return StageTimes(seconds("F"), seconds("B", "I"), seconds("W"))


def main() -> None:
    """Tiny layers show the host's share, wide ones the work's."""
    jax.config.update("jax_num_cpu_devices", 8)
    for width, stages, schedule in (
        (16, 4, "1f1b"),
        (16, 2, "1f1b"),
        (16, 8, "1f1b"),
        (512, 4, "1f1b"),
        (512, 4, "gpipe"),
        (512, 4, "zb-h1"),
    ):
        print(json.dumps(compared(width, stages, schedule)), flush=True)


if __name__ == "__main__":
    main()
