"""A process of a job: joins the others on this machine, and runs the scenarios that come in.

python -m tests.processes.worker NUMBER COUNT DEVICES PORT, with ["module:function", text, ...] in
a line for each.
"""

from __future__ import annotations

import json
import socket
import sys
from pkgutil import resolve_name

import jax

import autopar


def main() -> None:
    """Join; then for each line run and tell, until no more come."""
    number, count, devices, port = map(int, sys.argv[1:])
    jax.config.update("jax_num_cpu_devices", devices)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.config.update("jax_cross_host_transfer_socket_address", own)  # without it CPUs cannot put
    autopar.distributed(f"127.0.0.1:{port}", count, number)
    for line in sys.stdin:
        scenario, *texts = json.loads(line)
        found = resolve_name(scenario)(*texts)
        sys.stdout.write(f"\nRESULT {json.dumps(found)}\n")
        sys.stdout.flush()


main()
