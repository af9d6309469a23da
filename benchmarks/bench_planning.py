"""How long planning takes from the call to the Plan, slot by slot; prints one JSON line a case."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax

import autopar
from autopar.passes.base import Watcher
from benchmarks import models

CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt-12x768 unrolled": (
        lambda: models.gpt(12, 768, 12, 32768, 1024, 16),
        {"cluster": "8xh100", "mesh": (2, 4)},
    ),
    "gpt-12x768 scan": (
        lambda: models.gpt(12, 768, 12, 32768, 1024, 16, scan=True),
        {"cluster": "8xh100", "mesh": (2, 4)},
    ),
    "gpt-24x768 unrolled": (
        lambda: models.gpt(24, 768, 12, 32768, 1024, 16),
        {"cluster": "8xh100", "mesh": (2, 4)},
    ),
}


def measured(name: str, build: Callable[[], Any], options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one cold planning call, in all and in each slot; the rest is tracing."""
    create, step, batch = build()
    state = jax.eval_shape(create, jax.random.key(0))
    slots: dict[str, float] = {}
    watcher = Watcher(lambda slot, given, out, seconds: slots.__setitem__(slot, seconds))
    parallel = autopar.parallelize(step, **options)
    start = time.perf_counter()
    plan = parallel.plan_for(state, batch, watchers=[watcher])
    total = time.perf_counter() - start
    return {
        "case": name,
        "total_seconds": round(total, 3),
        "trace_and_build_seconds": round(total - sum(slots.values()), 3),
        "slot_seconds": {k: round(v, 3) for k, v in slots.items()},
        "predicted_step_seconds": plan.prediction.seconds,
        "gap": plan.outcome.gap,
        "outcome": plan.outcome.sentence,
    }


def main() -> None:
    """Every case in turn."""
    for name, (build, options) in CASES.items():
        print(json.dumps(measured(name, build, options)), flush=True)


if __name__ == "__main__":
    main()
