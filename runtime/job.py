"""A job of several processes: what they tell one another beside the arrays, and agree on.

JAX's coordination service has a key-value store; process 0 speaks for all. To agree, every process
tells its facts, process 0 compares them and gives a verdict, and all go on, or all stop:

    process 1  facts --+            +--> verdict: go on, or which value differs from which,
    process 2  facts --+--> process 0          or who has not come
    process 3  facts --+            +--> ...
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax

from autopar.errors import AutoparError, JobError
from autopar.frontend.compat import coordinator_address, job_store
from autopar.runtime.watch import STANDS_STILL, Watch, end_process, watch_over

LIMIT_SECONDS = 300.0  # as long as JAX waits for the processes of a job at its start
ARGUMENTS = "the list of arguments"  # among the facts
_CHUNK_BYTES = 1 << 20  # the service refuses values of more than four times that
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 5.0  # for a host to take a connection
_SLACK_SECONDS = 10.0  # that the verdict on who has not come takes to arrive


class Store(Protocol):
    """A key-value store that the processes share, as JAX's client has it."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Set a key that nobody has set."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """The value of a key; raises JaxRuntimeError where nobody sets it in time."""
        ...


class Job:
    """This process among those of its job, with the store that they share.

    Everything that is told has a topic, numbered as it comes up, in every process alike.
    """

    def __init__(
        self,
        index: int,
        count: int,
        store: Store | None,
        limit_seconds: float = LIMIT_SECONDS,
        watch: Watch | None = None,
    ) -> None:
        self.index, self.count, self.limit_seconds = index, count, limit_seconds
        self._store, self.watch = store, watch
        self._numbers = itertools.count()

    @property
    def is_alone(self) -> bool:
        """True if there is no other process."""
        return self.count == 1

    @property
    def address(self) -> str:
        """The address under which the other processes reach this one's host."""
        return own_address(coordinator_address() or "127.0.0.1:1")

    def topic(self, name: str) -> str:
        """A name that no other topic has."""
        return f"autopar/{next(self._numbers)}/{name}"

    # -- telling ---------------------------------------------------------------------------

    def tell(self, topic: str, text: str) -> None:
        """Put a text in the store, as this process's word on a topic."""
        assert self._store is not None
        data, place = zlib.compress(text.encode()), f"{topic}/{self.index}"
        chunks = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._store.key_value_set_bytes(f"{place}/{number}", chunk)
        self._store.key_value_set_bytes(place, str(len(chunks)).encode())

    def hear(self, topic: str, process: int, limit_seconds: float | None = None) -> str | None:
        """A process's word on a topic; None where it says nothing within the limit."""
        assert self._store is not None
        place = f"{topic}/{process}"
        end = None if limit_seconds is None else time.monotonic() + limit_seconds
        while True:
            left = _POLL_SECONDS if end is None else min(_POLL_SECONDS, end - time.monotonic())
            try:
                found = self._store.blocking_key_value_get_bytes(place, max(1, int(left * 1e3)))
                break
            except jax.errors.JaxRuntimeError as error:
                if not _is_late(error):
                    raise
                if end is not None and time.monotonic() >= end:
                    return None
        keys = (f"{place}/{number}" for number in range(int(found)))
        whole = (self._store.blocking_key_value_get_bytes(k, 60_000) for k in keys)
        return zlib.decompress(b"".join(whole)).decode()

    def heard(self, topic: str, process: int, subject: str) -> str:
        """A process's word on a topic; raises JobError, naming it, where it does not come."""
        found = self.hear(topic, process, self.limit_seconds)
        if found is None:
            raise JobError(self._absent([process], subject))
        return found

    # -- agreeing --------------------------------------------------------------------------

    def agree(self, subject: str, facts: Mapping[str, str]) -> None:
        """Go on where all processes have the same facts.

        Raises JobError in every process, with both values, where two differ, and names those
        that do not come within the limit.
        """
        if self.is_alone:
            return
        topic = self.topic("facts")
        if self.watch is not None:
            self.watch.ask(f"{subject}, with {facts.get(ARGUMENTS, 'its arguments')}")
        self.tell(topic, json.dumps(dict(facts)))
        if self.index == 0:
            fault = self._fault(topic, subject, facts)
            self.tell(f"{topic}/verdict", fault)
        else:
            heard = self.hear(f"{topic}/verdict", 0, self.limit_seconds + _SLACK_SECONDS)
            fault = heard if heard is not None else self._absent([0], subject)
        if fault:
            raise JobError(fault)

    def _fault(self, topic: str, subject: str, facts: Mapping[str, str]) -> str:
        """The difference between another process's facts and these; "" for none."""
        end = time.monotonic() + self.limit_seconds
        late: list[int] = []
        for process in range(1, self.count):
            told = self.hear(topic, process, max(0.0, end - time.monotonic()))
            if told is None:
                late.append(process)
                continue
            theirs = json.loads(told)
            for name in [*facts, *theirs]:
                here, there = (side.get(name, "nothing") for side in (facts, theirs))
                if here != there:
                    return (
                        f"the processes of this job do not agree on {subject}: {name} is "
                        f"{there} in process {process} and {here} in process 0. All must run the "
                        "same script, on the same JAX, with arguments of the same types."
                    )
        return self._absent(late, subject) if late else ""

    def _absent(self, late: Sequence[int], subject: str) -> str:
        names = ", ".join(map(str, late))
        return (
            f"process {names} of {self.count} did not come to {subject} within "
            f"{self.limit_seconds:g} s: it has ended, hangs, or does not call the step that the "
            "others call. Its own output says more."
        )

    def from_first(self, subject: str, make: Callable[[], str]) -> str:
        """The text that process 0 makes, in every process; what it raises stops all."""
        topic = self.topic("text")
        if self.index == 0:
            try:
                text = make()
            except AutoparError as error:
                self.tell(topic, f"!{type(error).__name__}: {error}")
                raise
            self.tell(topic, f"={text}")
            return text
        told = self.hear(topic, 0)
        assert told is not None
        if told.startswith("!"):
            raise JobError(f"process 0 could not make {subject}: {told[1:]}")
        return told[1:]


_ALONE = Job(0, 1, None)


def this_job() -> Job:
    """The job that JAX has this process in; alone where `jax.distributed` was not initialized.

    From here on the processes of a job watch over one another. Who is alone may plan for devices
    that are not here: none is asked for.
    """
    return _joined_job() if job_store() is not None else _ALONE


@lru_cache(maxsize=1)
def _joined_job() -> Job:
    job = Job(jax.process_index(), jax.process_count(), job_store())
    if not job.is_alone:
        job.watch = watch_over(job)
    return job


def end_job(why: str) -> None:
    """End all processes of the job, each with an exit code that is not 0, and say why here.

    For a step that hangs: an exception in a thread beside it would not reach it.
    """
    watch = this_job().watch
    if watch is not None:
        watch.fail(f"{STANDS_STILL}: {why.splitlines()[0]}")
    end_process(why)


def device_facts() -> dict[str, str]:
    """Facts that must be alike before processes share a plan: JAX, and the devices' order."""
    devices = jax.devices()
    runs = itertools.groupby(devices, lambda d: (d.platform, d.device_kind, d.process_index))
    order = ", ".join(
        f"process {process}: {platform} {kind} {[d.id for d in own]}"
        for (platform, kind, process), own in runs
    )
    return {"JAX": jax.__version__, "the order of devices": order}


def own_address(coordinator: str) -> str:
    """The address of the interface by which this host reaches another; IPv6 in brackets.

    A name that this host knows as itself says nothing: then it is the host's first address.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        found = str(probe.getsockname()[0])
    if _is_loopback(found) and not _is_loopback(host):
        known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM)
        others = (str(entry[4][0]) for entry in known)
        found = next((a for a in others if not _is_loopback(a)), found)
    return f"[{found}]" if ":" in found else found


def unreachable(address: str) -> str:
    """Why nothing can be reached at a "host:port"; "" where something answers."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _is_late(error: Any) -> bool:
    text = str(error)
    return "DEADLINE_EXCEEDED" in text or "NOT_FOUND" in text
