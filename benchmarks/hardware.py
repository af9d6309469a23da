"""Steps on the GPU that is here: seconds and bytes beside what was predicted, and plain `jax.jit`.

`python -m benchmarks.hardware [MODEL...] [--microbatches N]` uses autopar as a user does: a model
of the zoo, with a batch for one device, is planned for the local device and run, and run again
under plain jit from the same state. The batch lies on the device. One JSON line a model: seconds
by the host's clock, and of these what the GPU's kernels take by JAX's profiler; bytes that the
compiler counts, and the peak of JAX's allocator since the process began, with what the compiler
tried out: run one model at a time, with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

import autopar
from autopar.runtime.validation.steps import laid_out_bytes
from benchmarks.zoo.cases import CASES, Case

WARM, ROUNDS, STEPS = 2, 5, 4  # steps before the clock, and rounds of so many steps
COMPARED = 6  # losses of either side
_LARGE = 80 * 2**30  # a case keeps all its rows on a device of so many bytes


def compared(case: Case, microbatches: int | None) -> dict[str, Any]:
    """A model planned for the device that is here, beside plain jit."""
    model = case.model(1, _LARGE)
    rng = np.random.default_rng(0)
    batch = jax.device_put(jax.tree.map(lambda kind: _drawn(rng, kind), model.example_batch))
    ours = autopar.parallelize(model.step, microbatches=microbatches)
    state = ours.init(model.create_state, jax.random.key(0))
    programs = ours.compile(state, batch)
    parts = programs.values() if isinstance(programs, dict) else (programs,)
    planned = timed_steps(ours, state, batch)
    peak_bytes = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    plainly = jax.jit(model.step, donate_argnums=0)
    jitted = timed_steps(plainly, jax.jit(model.create_state)(jax.random.key(0)), batch)
    told = ours.plan.prediction
    return {
        "model": case.name,
        "microbatches": microbatches or 1,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "predicted_ms": round(told.seconds * 1e3, 3),
        "planned_ms": round(planned["seconds"] * 1e3, 3),
        "jit_ms": round(jitted["seconds"] * 1e3, 3),
        "planned_busy_ms": round(planned["busy_seconds"] * 1e3, 3),
        "jit_busy_ms": round(jitted["busy_seconds"] * 1e3, 3),
        "spread": round(max(planned["spread"], jitted["spread"]), 4),
        "predicted_over_measured": round(told.seconds / planned["seconds"], 4),
        "planned_over_jit": round(planned["seconds"] / jitted["seconds"], 4),
        "predicted_gib": round(told.peak_bytes / 2**30, 3),
        "compiled_gib": round(max(laid_out_bytes(p.memory_analysis()) for p in parts) / 2**30, 3),
        "planned_gib": round(peak_bytes / 2**30, 3),
        "largest_difference_of_a_loss": float(
            np.abs(np.subtract(planned["losses"], jitted["losses"])).max()
        ),
    }


def _drawn(rng: np.random.Generator, kind: Any) -> Any:
    if np.issubdtype(kind.dtype, np.integer):
        return rng.integers(0, 1000, kind.shape).astype(kind.dtype)
    return rng.standard_normal(kind.shape, dtype=np.float32).astype(kind.dtype)


def timed_steps(step: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    """The median seconds of a step, each round waited for at its end, and the first losses.

    And what the GPU's kernels take of a step, 0 without a GPU.
    """
    metrics: list[Any] = []
    taken: list[float] = []
    for number in range(ROUNDS + 1):
        begun = time.perf_counter()
        steps = STEPS if number else WARM
        for _ in range(steps):
            state, told = step(state, batch)
            metrics.append(told)
        jax.block_until_ready((state, metrics[-1]))
        taken.append((time.perf_counter() - begun) / steps)
    seconds = statistics.median(taken[1:])
    losses = [float(jax.tree.leaves(told)[0]) for told in metrics[:COMPARED]]
    spread = (max(taken[1:]) - min(taken[1:])) / seconds
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                state, told = step(state, batch)
                metrics.append(told)
            jax.block_until_ready((state, metrics[-1]))
        busy = _busy_seconds(Path(folder)) / STEPS
    return {"seconds": seconds, "spread": spread, "losses": losses, "busy_seconds": busy}


def _busy_seconds(folder: Path) -> float:
    """The seconds of all kernels in a profile."""
    taken = sum(
        event.duration_ns
        for path in folder.rglob("*.xplane.pb")
        for plane in ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream") and "Compute" in line.name
        for event in line.events
    )
    return float(taken) / 1e9


def main() -> None:
    """The models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--microbatches", type=int)
    options = parser.parse_args()
    for case in CASES:
        if case.name in options.models or not options.models:
            print(json.dumps(compared(case, options.microbatches)), flush=True)


if __name__ == "__main__":
    main()
