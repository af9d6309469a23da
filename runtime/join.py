"""Joins this process to its job: the processes that a launcher starts, mostly one a host.

srun, mpirun, a JobSet, Ray                 autopar.distributed() in each
---------------------------                 -----------------------------
process 0 on host a   ------ tells --->     waits at a:port for the others
process 1 on host b   ------ tells --->     connects to a:port, and so on
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import jax

from autopar.errors import ArgumentError, JobError
from autopar.frontend import compat
from autopar.runtime.job import own_address, this_job, unreachable
from autopar.runtime.watch import end_process

_LEAVING_SECONDS = 60  # for all to come to their end
_SLACK_SECONDS = 30  # after which a process that waits in vain is ended without a word


def distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    local_devices: Sequence[int] | None = (),
    heartbeat_seconds: int = 30,
    wait_seconds: int = 300,
) -> bool:
    """Join the other processes of this job; where there are none nothing is done.

    Call it first: JAX starts with it. It is `jax.distributed.initialize` with safe defaults:
    process 0 listens on the one address that the others know; a process that raises, or is lost,
    ends all others within seconds, and they name it.

    Args:
        coordinator: "host:port" of process 0. Left out, like the next two, it is what Slurm, Open
            MPI, Kubernetes or a TPU pod tell.
        processes: their number.
        process: the number of this one.
        local_devices: numbers of the host's devices that are this process's; none given are all of
            them. None is JAX's own choice: under Slurm and MPI one device for each process.
        heartbeat_seconds: how long a process may say nothing before it is taken for lost.
        wait_seconds: how long to wait for the others; then this process says so, and ends.

    Returns True if there are other processes. Raises JobError where they cannot be joined, and
    ArgumentError where only some of the first three are given.
    """
    if compat.job_store() is not None:  # it was joined before
        return not this_job().is_alone
    given = (coordinator, processes, process)
    told = None not in given
    if not told and given != (None, None, None):
        raise ArgumentError(
            f"distributed({coordinator!r}, {processes!r}, {process!r}): give the coordinator's "
            "address, the number of processes and the number of this one, or none of them"
        )
    address, count, number = given if told else compat.launched_job(wait_seconds)
    if address is None or count is None or number is None or count == 1:
        return False
    late = threading.Timer(wait_seconds, lambda: end_process(_late(address, count, number)))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            local_device_ids=None if local_devices is None else list(local_devices),
            coordinator_bind_address=_free_address(address) if number == 0 else None,
            initialization_timeout=wait_seconds + _SLACK_SECONDS,  # then JAX aborts, and names none
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=_LEAVING_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise JobError(
            f"process {number} of {count} cannot join its job at {address}: {error}. All processes "
            "must be started, the port of process 0 must be free there and reachable from the "
            "others, and autopar.distributed() must come before anything that asks for a device"
        ) from error
    finally:
        late.cancel()
    return not this_job().is_alone


def _late(coordinator: str, count: int, number: int) -> str:
    """Why a process could not join in time."""
    who = f"process {number} of {count} has waited for its job at {coordinator} for too long: "
    if why := unreachable(coordinator):
        return (
            f"{who}process 0 does not answer there ({why}). It must be started, and the port "
            "reachable from here; its own output says more."
        )
    return (
        f"{who}process 0 answers there, and not all of the {count} have come. All must be started, "
        "with the same address and number of processes; their own output says more."
    )


def _free_address(coordinator: str) -> str:
    """The address for process 0 to listen on; raises OSError where its port is taken."""
    own, port = own_address(coordinator), coordinator.rpartition(":")[2]
    family = socket.AF_INET6 if own.startswith("[") else socket.AF_INET
    # JAX ends without a word where it cannot have the port.
    socket.create_server((own.strip("[]"), int(port)), family=family).close()
    return f"{own}:{port}"
