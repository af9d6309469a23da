"""The whole way: which devices, what they are, measure, fit.

A ladder of experiments is run within its time, each repeated for as long as it tells something.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autopar.calibrating.fitted import Measured, calibrated, predicted_seconds
from autopar.calibrating.ladder import LadderEffort, ladder
from autopar.calibrating.least_squares import significant
from autopar.cluster import Cluster
from autopar.cluster.calibration import Experiment, Sample
from autopar.cluster.catalog import chip_of_kind
from autopar.cluster.names import local_name
from autopar.errors import ClusterError
from autopar.frontend.devices import local_devices
from autopar.ir.devices import DeviceFacts
from autopar.progress import progress
from autopar.runtime.measure.bench import DeviceBench, Repeats, Timing
from autopar.runtime.measure.devices import (
    choose_devices,
    devices_at,
    is_first,
    jax_version,
    join_job,
)

_STAND_IN = "a100"  # whose figures a GPU that is not in the catalog starts from


@dataclass(frozen=True)
class Calibrated:
    """A cluster with measured figures, and what the user should know of how they came about.

    All processes of a job come to the same; the first one `speaks` for them.
    """

    cluster: Cluster
    notes: tuple[str, ...] = ()
    speaks: bool = True


def calibrate(devices: str, effort: LadderEffort, job: str = "") -> Calibrated:
    """Measure devices ("" for all, else a text as choose_devices reads) and fit their cluster.

    `job` is how to join the other processes of one, as join_job reads it. Raises ClusterError
    where there is none, the devices make no cluster, or the time was too short.
    """
    with progress("calibrate", "measuring") as told:
        if job:
            join_job(job)
        chosen = choose_devices(devices)
        facts = [local_devices()[i] for i in chosen]
        like, cluster = starting_cluster(facts)
        bench = DeviceBench(cluster, devices_at(chosen))
        findings = run_ladder(cluster, bench, effort, told.count)
        measured = Measured(
            samples=tuple(findings.samples),
            like=like,
            jax=jax_version(),
            device_kind=facts[0].kind,
            date=datetime.date.today().isoformat(),
        )
        notes = list(skipped_lines(findings))
        if cluster.device_count == 1:
            notes.append("one device has no links to measure: theirs are the catalog's")
        return Calibrated(calibrated(cluster, measured), tuple(notes), is_first())


def starting_cluster(facts: Sequence[DeviceFacts]) -> tuple[str, Cluster]:
    """The cluster that devices make before they are measured, and the catalog's name for it.

    A GPU that the catalog does not know starts from another's figures under its own name.
    Raises ClusterError where the devices differ or are only part of a torus's box.
    """
    first = facts[0]
    known = first.platform != "gpu" or chip_of_kind(first.kind) is not None
    name = local_name(facts if known else [replace(f, kind=_STAND_IN) for f in facts])
    cluster = Cluster.parse(name)
    if cluster.device_count != len(facts):
        raise ClusterError(
            f"the {len(facts)} devices are part of a {name} of {cluster.device_count}; measure a "
            "whole box of chips"
        )
    chip = cluster.chip
    if memory := min(f.memory_bytes for f in facts):
        chip = replace(chip, memory_bytes=memory)
    if known:
        return name, replace(cluster, chip=chip)
    own = "-".join(first.kind.lower().removeprefix("nvidia ").split())
    name_of_own = name.replace(cluster.chip.name, own)
    return name, replace(cluster, name=name_of_own, chip=replace(chip, name=own))


# -- the ladder within its time --------------------------------------------------------------------


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
