"""Runs a ladder of experiments within its time, each repeated for as long as it tells something."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autopar.calibrating.fitted import predicted_seconds
from autopar.calibrating.ladder import LadderEffort, ladder
from autopar.calibrating.least_squares import significant
from autopar.cluster import Cluster
from autopar.cluster.calibration import Experiment, Sample
from autopar.runtime.measure.timing import Repeats, Timing

_TRIPS = (2, 4096)  # the fewest and the most repetitions inside one program
_SLOW = 10.0  # times the longest op that is asked for, from which on it is left out
_FAR = 4.0  # times that a program may last too short before it is made anew


class Bench(Protocol):
    """A runner of experiments: the devices, or a stand-in."""

    def clock(self) -> float:
        """Seconds that go by; the same on every process."""
        ...

    def timed(self, experiment: Experiment, trips: int, repeats: Repeats) -> Timing | str:
        """The timing of a program of `trips` repetitions, or why there is none."""
        ...


Told = Callable[[int, int, str], None]  # how many are done, of how many, what is next


@dataclass(frozen=True)
class Refusal:
    """An experiment that the devices cannot run at this size or a larger one, and why."""

    size: int
    why: str


@dataclass
class Findings:
    """The samples measured so far, and what could not be measured."""

    samples: list[Sample] = field(default_factory=list[Sample])
    refused: dict[str, Refusal] = field(default_factory=dict[str, Refusal])  # by kind and dtype
    left: int = 0  # experiments for which the time was too short


def run_ladder(cluster: Cluster, bench: Bench, effort: LadderEffort, told: Told) -> Findings:
    """Run the experiments of the ladder that the time allows."""
    steps = ladder(cluster, effort)
    end, findings, pace = bench.clock() + effort.seconds, Findings(), _Pace(cluster)
    for done, experiment in enumerate(steps):
        told(done, len(steps), str(experiment))
        if bench.clock() > end:
            findings.left = len(steps) - done
            break
        if pace.seconds(experiment) <= _SLOW * effort.longest:
            _measure(experiment, bench, effort, pace, findings)
    told(len(steps) - findings.left, len(steps), "fitting")
    return findings


def _measure(
    experiment: Experiment, bench: Bench, effort: LadderEffort, pace: _Pace, findings: Findings
) -> None:
    name, size = f"{experiment.kind} {experiment.dtype}", math.prod(experiment.shape)
    if name in findings.refused and size >= findings.refused[name].size:
        return
    trips = pace.trips(experiment, effort.span)
    timing = bench.timed(experiment, trips, effort.repeats)
    if isinstance(timing, Timing):
        pace.note(experiment, timing.seconds)
        again = pace.trips(experiment, effort.span)
        if again > _FAR * trips:
            timing = bench.timed(experiment, again, effort.repeats)
    if isinstance(timing, str):
        findings.refused[name] = Refusal(size, timing)
        return
    pace.note(experiment, timing.seconds)
    findings.samples.append(
        Sample(
            experiment, significant(timing.seconds, 4), significant(timing.spread, 2), timing.count
        )
    )


class _Pace:
    """Expected durations of ops: as predicted, and as others of their series were off by."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._off: dict[tuple[str, ...], float] = {}

    def trips(self, experiment: Experiment, span: float) -> int:
        """Repetitions that last about `span` seconds."""
        fewest, most = _TRIPS
        return min(most, max(fewest, math.ceil(span / self.seconds(experiment))))

    def seconds(self, experiment: Experiment) -> float:
        """Expected seconds of an op."""
        off = self._off.get(experiment.series, 1.0)
        return off * predicted_seconds(self._cluster, experiment)

    def note(self, experiment: Experiment, seconds: float) -> None:
        """Learn from what an experiment took."""
        self._off[experiment.series] = seconds / predicted_seconds(self._cluster, experiment)


def skipped_lines(findings: Findings) -> Sequence[str]:
    """Lines that tell the user what is missing."""
    lines = [
        f"{name} was not measured from size {refusal.size} on: {refusal.why}"
        for name, refusal in findings.refused.items()
    ]
    if findings.left:
        lines.append(f"the time was over with {findings.left} measurements to go (--seconds)")
    return lines
