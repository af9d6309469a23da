"""The devices to measure: the processes of a job joined, and those chosen among what is present."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from autopar.errors import ClusterError
from autopar.frontend.devices import keep_to_cpu

# -- the processes of a job, one a host ------------------------------------------------------------


_FORM = re.compile(r"([^,]+:\d+),(\d+),(\d+)")


def join_job(text: str) -> None:
    """Wait for the other processes of a job; before anything asks JAX for a device.

    The text is "auto" where JAX finds out by itself (Slurm, MPI, TPU pods), else the first
    process's address, how many there are and which this is. Raises ClusterError where there is no
    such job.
    """
    found = _FORM.fullmatch(text)
    if text != "auto" and found is None:
        raise ClusterError(
            f"job {text!r} is not understood; write auto, or HOST:PORT,PROCESSES,NUMBER as in "
            "'10.0.0.1:1234,2,0'"
        )
    try:
        if found is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(found[1], int(found[2]), int(found[3]))
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the processes of job {text!r} cannot be joined: {error}") from error


def is_first() -> bool:
    """True if this process speaks for all."""
    return jax.process_index() == 0


# -- the devices to measure ------------------------------------------------------------------------


FORMS = "'4' (the first four), '0,2,3' (their ids) or 'cpu:8' (eight virtual CPU devices)"


def choose_devices(text: str) -> tuple[int, ...]:
    """Positions in jax.devices() of the devices that a text names; "" means all.

    Raises ClusterError where the text is not understood or the devices are not there.
    """
    kind, colon, count = text.partition(":")
    if colon:
        if kind != "cpu" or not count.isdigit() or int(count) < 1:
            raise ClusterError(f"devices {text!r} are not understood; write {FORMS}")
        return _virtual(int(count))
    devices = jax.devices()
    if not text:
        return tuple(range(len(devices)))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ClusterError(f"devices {text!r} are not understood; write {FORMS}")
    if len(parts) == 1 and int(text) > 0:
        return _first(int(text), len(devices))
    places = {device.id: i for i, device in enumerate(devices)}
    wanted = [int(part) for part in parts]
    if missing := [i for i in wanted if i not in places]:
        raise ClusterError(f"there are no devices {missing}; JAX has {sorted(places)}")
    if len(set(wanted)) < len(wanted):
        raise ClusterError(f"devices {text!r} name one twice")
    return tuple(sorted(places[i] for i in wanted))


def devices_at(positions: Sequence[int]) -> tuple[Any, ...]:
    """The devices at those positions."""
    devices = jax.devices()
    return tuple(devices[i] for i in positions)


def jax_version() -> str:
    """The version of JAX that runs them."""
    return str(jax.__version__)


def _virtual(count: int) -> tuple[int, ...]:
    keep_to_cpu()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started: what is there may do
    return _first(count, len(jax.devices("cpu")))


def _first(count: int, present: int) -> tuple[int, ...]:
    if count > present:
        raise ClusterError(
            f"{count} devices are to be measured but JAX has {present}; write {FORMS}"
        )
    return tuple(range(count))
