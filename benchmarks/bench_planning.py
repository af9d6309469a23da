"""How long planning takes from the call to the Plan, part by part; prints one JSON line a case.

`python -m benchmarks.bench_planning [CASE...]` runs the named cases, or all in turn. A case's parts
are JAX's own tracing with the graph made of it, the building of the sharding problem, its solving,
the lowering to a listing, and the rest (memory, the plan itself). Cases "at" a share are planned
within so much of what the plan without a limit holds, on any mesh of up to two axes. The last line
of the GPT cases gives the growth of build + solve from 12 to 96 layers.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

import autopar
from autopar.passes.base import Watcher
from benchmarks import models
from benchmarks.deepseek import deepseek

_GPT = {"cluster": "8xh100", "mesh": (2, 4)}
_LLAMA = {"cluster": "32xh100", "mesh": (4, 8)}


def _gpt(layers: int, **options: Any) -> Callable[[], models.Model]:
    return lambda: models.gpt(layers, 768, 12, 32768, 1024, 16, **options)


CASES: dict[str, tuple[Callable[[], models.Model], dict[str, Any]]] = {
    "gpt-12x768": (_gpt(12), _GPT),
    "gpt-24x768": (_gpt(24), _GPT),
    "gpt-48x768": (_gpt(48), _GPT),
    "gpt-96x768": (_gpt(96), _GPT),
    "gpt-12x768 scan": (_gpt(12, scan=True), _GPT),
    "llama-8b": (lambda: models.llama(remat=True), _LLAMA),
    "llama-8b scan": (lambda: models.llama(remat=True, scan=True), _LLAMA),
    "deepseek-671b scan": (deepseek, {"cluster": "v5p:8x8x8", "mesh": (8, 8, 8)}),
}
# Cases within a share of what the plan without a limit holds.
WITHIN: dict[str, tuple[Callable[[], models.Model], float]] = {
    "gpt-4x768 at 0.7": (_gpt(4), 0.7),
    "gpt-24x768 at 0.6": (_gpt(24), 0.6),
    "gpt-12x768 scan at 0.9": (_gpt(12, scan=True), 0.9),
}
_INNER = {"build": "build", "solve": "solve", "lower": "lower"}


def measured(name: str, build: Callable[[], models.Model], options: dict[str, Any]) -> Any:
    """Seconds of one planning call, in all and in each part."""
    create, step, batch = build()
    state = jax.eval_shape(create, jax.random.key(0))
    parts: dict[str, float] = defaultdict(float)

    def note(slot: str, given: object, out: object, seconds: float) -> None:
        del given, out
        parts[slot] += seconds

    parallel = autopar.parallelize(step, **options)
    start = time.perf_counter()
    plan = parallel.watched([Watcher(note)], state, batch).plan
    total = time.perf_counter() - start
    again = time.perf_counter()
    path, spec = _pinned(plan)
    pinned = parallel.what_if(pins={path: spec})
    return {
        "case": name,
        "total_seconds": round(total, 3),
        "trace_seconds": round(parts["trace"], 3),
        "build_seconds": round(parts["build"], 3),
        "solve_seconds": round(parts["solve"], 3),
        "lower_seconds": round(parts["lower"], 3),
        "rest_seconds": round(total - sum(parts[p] for p in ("trace", *_INNER)), 3),
        "replan_seconds": round(time.perf_counter() - again, 3),
        "pin": f"{path} = {spec}",
        "pinned_step_seconds": pinned.prediction.seconds,
        "predicted_step_seconds": plan.prediction.seconds,
        "gap": plan.outcome.gap,
        "outcome": plan.outcome.sentence,
    }


def measured_within(name: str, build: Callable[[], models.Model], share: float) -> Any:
    """Seconds of planning within a share of the bytes that the plan without a limit holds."""
    create, step, batch = build()
    state = jax.eval_shape(create, jax.random.key(0))
    roomy = autopar.plan(step, state, batch, cluster="8xh100")
    limit = share * roomy.prediction.peak_bytes / 2**30
    start = time.perf_counter()
    plan = autopar.plan(step, state, batch, cluster="8xh100", memory_gb=limit)
    return {
        "case": name,
        "total_seconds": round(time.perf_counter() - start, 3),
        "mesh": str(plan.mesh),
        "share_held": round(plan.prediction.peak_bytes / roomy.prediction.peak_bytes, 3),
        "roomy_step_seconds": roomy.prediction.seconds,
        "predicted_step_seconds": plan.prediction.seconds,
        "outcome": plan.outcome.sentence,
    }


def _pinned(plan: autopar.Plan) -> tuple[str, tuple[tuple[str, ...] | None, ...]]:
    """The largest parameter's path, and a pin that takes one mesh axis off it."""
    state = [a for a in plan.arguments if a.role == "state" and "params" in a.path]
    largest = max(state, key=lambda a: (math.prod(a.shape), a.path))
    dims = [axes or None for axes in largest.sharding.dims]
    sharded = [d for d, axes in enumerate(dims) if axes]
    if sharded:
        dims[sharded[-1]] = (dims[sharded[-1]] or ())[:-1] or None
    return largest.path, tuple(dims)


def main(names: list[str]) -> None:
    """The named cases, or every one, in turn."""
    spent: dict[str, float] = {}
    for name in names or [*CASES, *WITHIN]:
        if name in WITHIN:
            print(json.dumps(measured_within(name, *WITHIN[name])), flush=True)
            continue
        line = measured(name, *CASES[name])
        spent[name] = line["build_seconds"] + line["solve_seconds"]
        print(json.dumps(line), flush=True)
    if {"gpt-12x768", "gpt-96x768"} <= spent.keys():
        growth = spent["gpt-96x768"] / spent["gpt-12x768"]
        print(json.dumps({"build_and_solve_growth_12_to_96_layers": round(growth, 2)}))


if __name__ == "__main__":
    main(sys.argv[1:])
