"""Joins the processes of a job, one a host, so that their devices are measured together."""

from __future__ import annotations

import re

import jax

from autopar.errors import ClusterError

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
