"""A bench whose devices keep to a model, but for noise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from autopar.calibrating.calibrate import Findings, run_ladder
from autopar.calibrating.fitted import (
    Measured,
    calibrated,
    figures_of,
    predicted_seconds,
    with_figures,
)
from autopar.calibrating.ladder import FULL, LadderEffort
from autopar.cluster import Cluster
from autopar.cluster.calibration import Experiment
from autopar.runtime.measure.bench import Repeats, Timing


@dataclass
class ModelBench:
    """Answers with a cluster's own prices and a little noise; a second goes by for each timing."""

    truth: Cluster
    noise: float = 0.0
    refused: str = ""  # a dtype
    refused_from: int = 2**62  # bytes of an all-reduce
    now: float = 0.0
    asked: list[tuple[Experiment, int]] = field(default_factory=list[tuple[Experiment, int]])
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.now

    def timed(self, experiment: Experiment, trips: int, repeats: Repeats) -> Timing | str:
        self.now += 1.0
        self.asked.append((experiment, trips))
        if experiment.dtype == self.refused:
            return "TypeError: no such unit"
        if experiment.kind == "all-reduce" and experiment.shape[0] >= self.refused_from:
            return "RESOURCE_EXHAUSTED: out of memory"
        factor = self.chance.lognormvariate(0.0, self.noise)
        return Timing(factor * predicted_seconds(self.truth, experiment), self.noise, repeats.most)


def shifted(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    """A cluster some of whose figures are other ones by a factor."""
    chip, known = cluster.chip, figures_of(cluster.topology)
    links = {name: known[name] * by for name, by in factors.items() if name in known}
    chip = replace(
        chip,
        launch_seconds=chip.launch_seconds * factors.get("launch_seconds", 1.0),
        memory_bytes_per_second=chip.memory_bytes_per_second
        * factors.get("memory_bytes_per_second", 1.0),
        half_flops=chip.half_flops * factors.get("half_flops", 1.0),
        peak_flops=tuple(
            (d, peak * factors.get(f"peak_flops.{d}", 1.0)) for d, peak in chip.peak_flops
        ),
    )
    return replace(cluster, chip=chip, topology=with_figures(cluster.topology, links))


def figures(cluster: Cluster) -> dict[str, float]:
    """What is reached of every figure of a cluster that may be fitted."""
    chip = cluster.chip
    return {
        "launch_seconds": chip.launch_seconds,
        "memory_bytes_per_second": chip.memory_efficiency * chip.memory_bytes_per_second,
        "half_flops": chip.half_flops,
        **{f"peak_flops.{d}": chip.compute_efficiency * p for d, p in chip.peak_flops},
        **figures_of(cluster.topology),
    }


def found_on(cluster: Cluster, bench: ModelBench, effort: LadderEffort = FULL) -> Findings:
    """What a bench answers, starting from a cluster's figures."""
    return run_ladder(cluster, bench, effort, lambda done, total, doing: None)


def measured(cluster: Cluster, bench: ModelBench, effort: LadderEffort = FULL) -> Cluster:
    """A cluster as it is calibrated on a bench."""
    samples = tuple(found_on(cluster, bench, effort).samples)
    return calibrated(cluster, Measured(samples, cluster.name, "0.10.2", "made up", "2026-01-01"))
