"""Predicted beside measured seconds of GPT steps on 8 CPU devices: stock figures and measured ones.

`python -m benchmarks.bench_calibrate [CLUSTER.toml]` takes the file of `autopar calibrate`, or
measures first. Each case is planned for either cluster and both steps run in turn; one JSON line a
case, then one with how far off either cluster's predictions are, and how well they rank the plans.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import jax
import numpy as np

import autopar
from autopar.calibrating.calibrate import calibrate
from autopar.calibrating.ladder import FULL
from benchmarks import models

ROUNDS = 15
CASES = (
    ("dp", (8,)),
    ("zero1", (8,)),
    ("fsdp", (8,)),
    ("megatron", (8,)),
    ("megatron", (2, 4)),
    ("fsdp+tp", (4, 2)),
    ("auto", None),
)


class Side:
    """A step as it is planned for one cluster, with what it is run on."""

    def __init__(self, cluster: autopar.Cluster, method: str, mesh: tuple[int, ...] | None) -> None:
        model = models.gpt(2, 256, 8, 1024, 128, 16, dtype="float32", optimizer="sgd")
        self._step = autopar.parallelize(
            model.step, cluster=cluster, method=method, mesh=mesh, donate=False
        )
        rows = np.random.default_rng(0)
        self._batch = {
            name: rows.integers(0, 1024, ids.shape, np.int32)
            for name, ids in model.example_batch.items()
        }
        self._state: Any = self._step.init(model.create_state, jax.random.key(0))
        self.predicted = self._step.plan_for(self._state, self._batch).prediction.seconds
        self.mesh = str(self._step.plan.mesh)
        self.seconds: list[float] = []
        jax.block_until_ready(self._step(self._state, self._batch))

    def run(self) -> None:
        """One step more."""
        start = time.perf_counter()
        jax.block_until_ready(self._step(self._state, self._batch))
        self.seconds.append(time.perf_counter() - start)

    @property
    def data(self) -> dict[str, Any]:
        """Both seconds of a step."""
        measured = statistics.median(self.seconds)
        return {
            "mesh": self.mesh,
            "predicted_seconds": self.predicted,
            "measured_seconds": measured,
            "ratio": round(self.predicted / measured, 3),
        }


def summary(lines: Sequence[dict[str, Any]], side: str) -> dict[str, float]:
    """The typical factor between prediction and measurement, and Kendall's tau of the ranks."""
    pairs = [(one[side]["predicted_seconds"], one[side]["measured_seconds"]) for one in lines]
    off = statistics.median(abs(math.log(p / m)) for p, m in pairs)
    signs = [math.copysign(1, (a[0] - b[0]) * (a[1] - b[1])) for a, b in combinations(pairs, 2)]
    return {"factor": round(math.exp(off), 2), "kendall_tau": round(statistics.mean(signs), 2)}


def measured_cluster() -> autopar.Cluster:
    """The cluster of the file that is named, or as it is measured now."""
    if len(sys.argv) > 1:
        jax.config.update("jax_num_cpu_devices", 8)
        return autopar.Cluster.from_toml(sys.argv[1])
    return calibrate("cpu:8", FULL).cluster


def main() -> None:
    """Every case, then the summary."""
    clusters = {"measured": measured_cluster(), "stock": autopar.Cluster.parse("8xcpu")}
    lines: list[dict[str, Any]] = []
    for method, mesh in CASES:
        sides = {name: Side(cluster, method, mesh) for name, cluster in clusters.items()}
        for _ in range(ROUNDS):
            for side in sides.values():
                side.run()
        lines.append({"method": method, **{name: side.data for name, side in sides.items()}})
        print(json.dumps(lines[-1]), flush=True)
    print(json.dumps({name: summary(lines, name) for name in clusters}))


if __name__ == "__main__":
    main()
