"""The whole way: which devices, what they are, measure, fit."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.calibrating.fitted import Measured, calibrated
from autopar.calibrating.ladder import LadderEffort
from autopar.calibrating.running import run_ladder, skipped_lines
from autopar.cluster import Cluster
from autopar.cluster.local import chip_of_kind, local_name
from autopar.errors import ClusterError
from autopar.frontend.devices import local_devices
from autopar.ir.devices import DeviceFacts
from autopar.progress import Progress, progress
from autopar.runtime.measure.bench import DeviceBench
from autopar.runtime.measure.chosen import choose_devices, devices_at, jax_version
from autopar.runtime.measure.job import is_first, join_job

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
        return _calibrate(devices, effort, told, job)


def _calibrate(devices: str, effort: LadderEffort, told: Progress, job: str) -> Calibrated:
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
