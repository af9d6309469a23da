"""`autopar.distributed()` joins a job, does nothing where there is none, or says why it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

import autopar
from autopar.errors import ArgumentError, JobError
from autopar.frontend import compat
from autopar.runtime.job import Job
from autopar.runtime.transport.pull import PullTransport
from tests.processes.test_job import Shared


def test_alone_nothing_is_done() -> None:
    assert not autopar.distributed()
    assert not autopar.distributed("127.0.0.1:1", 1, 0)
    assert compat.job_store() is None


def test_some_of_the_arguments_are_not_enough() -> None:
    with pytest.raises(ArgumentError, match="or none of them"):
        autopar.distributed("127.0.0.1:1", process=0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JobError, match=f"process 0 of 2 cannot join its job at {address}"):
            autopar.distributed(address, 2, 0)


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "process 0 answers there, and not all"), (1, "process 0 does not answer there")],
)
def test_who_waits_for_the_others_in_vain_says_so_and_ends(number: int, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = f"import autopar; autopar.distributed({address!r}, 2, {number}, wait_seconds=1)"
    ended = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert f"process {number} of 2 has waited for its job at {address}" in ended.stderr
    assert told in ended.stderr


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    """A firewall lets the coordinator's port through, and not those by which arrays travel."""
    store = Shared()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = f"127.0.0.1:{probe.getsockname()[1]}"
    there = Job(1, 2, store)
    there.tell(there.topic("transfer"), closed)
    transport = PullTransport(Job(0, 2, store))
    with pytest.raises(JobError, match=f"process 0 of 2 cannot reach process 1 at {closed}"):
        transport._connection(1)
