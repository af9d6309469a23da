"""A process of a job: joins the others on this machine, runs a scenario and prints its result.

python -m tests.processes.worker NUMBER COUNT DEVICES PORT SCENARIO [TEXT...]
"""

from __future__ import annotations

import json
import socket
import sys

import jax

import autopar


def main() -> None:
    """Join, run and tell."""
    number, count, devices, port = map(int, sys.argv[1:5])
    jax.config.update("jax_num_cpu_devices", devices)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.config.update("jax_cross_host_transfer_socket_address", own)  # without it CPUs cannot put
    autopar.distributed(f"127.0.0.1:{port}", count, number)
    from tests.processes import scenarios

    found = getattr(scenarios, sys.argv[5])(*sys.argv[6:])
    sys.stdout.write(f"\nRESULT {json.dumps(found)}\n")
    sys.stdout.flush()


main()
