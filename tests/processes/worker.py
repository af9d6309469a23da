"""A process of a job: joins the others on this machine, and runs the scenarios that come in.

python -m tests.processes.worker NUMBER COUNT DEVICES PORT, with ["module:function", text, ...] in
a line for each; or `serve`, forked from a process that has no JAX devices yet.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jax

import autopar


def join(number: int, count: int, devices: int, port: int) -> None:
    """Be this number of so many processes, with so many devices."""
    jax.config.update("jax_num_cpu_devices", devices)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.config.update("jax_cross_host_transfer_socket_address", own)  # without it CPUs cannot put
    # By the four connections that are the default a put fails now and then on a busy machine:
    # one job in 40. By one, none in 170 did.
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0")
    autopar.distributed(f"127.0.0.1:{port}", count, number)


def run(scenario: str, *texts: str) -> Any:
    """The result of a scenario."""
    return resolve_name(scenario)(*texts)


def serve(
    asked: Connection,
    log: Path,
    number: int,
    count: int,
    devices: int,
    port: int,
    environment: Mapping[str, str],
) -> None:
    """Join; then answer each scenario that is asked for, until no more come.

    All that it says goes into the log. The environment is that of who starts it.
    """
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    jax.config.update("jax_platforms", "cpu")
    try:
        join(number, count, devices, port)
        while True:
            try:
                words = asked.recv()
            except EOFError:
                return
            asked.send(json.dumps(run(*words)))
    except BaseException as error:  # by the hook, which multiprocessing does not call, others hear
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:  # multiprocessing leaves these out
        atexit._run_exitfuncs()


def main() -> None:
    """Join; then for each line run and tell, until no more come."""
    number, count, devices, port = map(int, sys.argv[1:])
    join(number, count, devices, port)
    for line in sys.stdin:
        found = run(*json.loads(line))
        sys.stdout.write(f"\nRESULT {json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
