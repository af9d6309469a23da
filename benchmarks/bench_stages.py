"""How long the search over stages takes, part by part; prints one JSON line a case.

`python -m benchmarks.bench_stages [CASE...]` runs the named cases, or all in turn: from the call to
the Plan. Seconds are of the wall and, as machines are busy, of this process's own work. Alpa needed
2,393 s for the largest case, compiling and profiling included (OSDI 2022, table 5).
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from typing import Any

import jax

import autopar
from autopar.passes.base import Watcher
from benchmarks import models

# layers, width, heads, vocabulary, sequence, batch; then what is asked for
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "gpt-1.3b 8xv100": (
        (24, 2048, 32, 51200, 1024, 1024),
        {"cluster": "8xv100", "stages": "auto", "microbatches": "auto"},
    ),
    "gpt-39b 8x8xv100": (
        (48, 8192, 64, 51200, 1024, 1024),
        {"cluster": "8x8xv100", "stages": "auto", "microbatches": "auto"},
    ),
    "gpt-39b 8x8xv100 stages=8": (
        (48, 8192, 64, 51200, 1024, 1024),
        {"cluster": "8x8xv100", "stages": 8, "microbatches": "auto"},
    ),
}
_PARTS = ("trace", "batch", "layer", "stage", "shard")


def measured(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one search, in all and of its parts, and what it found."""
    create, step, batch = models.gpt(*shape)
    state = jax.eval_shape(create, jax.random.key(0))
    parts: dict[str, float] = defaultdict(float)

    def note(slot: str, given: object, out: object, seconds: float) -> None:
        del given, out
        parts[slot] += seconds

    parallel = autopar.parallelize(step, **options)
    wall, own = time.perf_counter(), time.process_time()
    plan = parallel.watched([Watcher(note)], state, batch).plan
    return {
        "case": name,
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - own, 2),
        **{f"{part}_seconds": round(parts[part], 2) for part in _PARTS},
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "submeshes": [str(s.mesh) for s in plan.submeshes],
        "predicted_step_seconds": plan.prediction.seconds,
        "peak_gib": round(plan.prediction.peak_bytes / 2**30, 2),
    }


def main() -> None:
    """Run the cases that are named, or all."""
    for name in sys.argv[1:] or CASES:
        print(json.dumps(measured(name, *CASES[name])), flush=True)


if __name__ == "__main__":
    main()
