"""`autopar.distributed()` joins a job, does nothing where there is none, or says why it cannot."""

from __future__ import annotations

import socket

import pytest

import autopar
from autopar.errors import ArgumentError, JobError
from autopar.frontend import compat


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
