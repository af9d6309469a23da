"""A watch over the processes of a job: when one is lost, all others end, and say which it was.

JAX ends a job whose process stops beating after 100 s, and a step that waits for a lost process
hears nothing at all. So each holds a connection to process 0, which its kernel closes whatever
becomes of it:

    process 1 --+                       1 is killed: its connection closes
    process 2 --+--> process 0          0 tells 2 and 3 "process 1 of 4 was lost", and all end
    process 3 --+                       0 is killed: all connections close

A process that raises says why before it ends. One that is done says goodbye, and is not missed.
One whose step stands still says so, and each of the others shows where in its code it is.
One that asks for a plan says after how many calls: who makes the next call without asking has other
arguments, and both would wait for each other.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TextIO

import jax

STANDS_STILL = "stands still"  # what a process says of itself whose step waits for ever
_GOODBYE = "goodbye"
_ASKS = "asks "
_CODE = 1
_TOLD = 2000  # characters of what a process says of itself
_PATIENCE_SECONDS = 60.0  # for a connection to be made
_LAST_WORD_SECONDS = 5.0


class Watched(Protocol):
    """A job, as far as the watch needs it."""

    index: int
    count: int

    @property
    def address(self) -> str:
        """The address under which the other processes reach this one's host."""
        ...

    def topic(self, name: str) -> str:
        """A name that no other topic has."""
        ...

    def tell(self, topic: str, text: str) -> None:
        """Put a text in the store."""

    def heard(self, topic: str, process: int, subject: str) -> str:
        """A process's text on a topic."""
        ...


def end_process(message: str) -> None:
    """Say why, and end: other threads may wait for ever for what will not come."""
    sys.stdout.flush()
    sys.stderr.write(f"autopar: {message}\n")
    sys.stderr.flush()
    os._exit(_CODE)


class Watch:
    """This process's end of the watch; `end` is called with the reason when another is lost."""

    def __init__(self, job: Watched, end: Callable[[str], Any] = end_process) -> None:
        self._job, self._end = job, end
        self._lines: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._last_word, self._last_asked = "", b""  # which who connects later is told
        self._asked = self._called = 0
        self._asking: dict[int, tuple[int, int, str]] = {}
        topic = job.topic("watch")
        if job.index == 0:
            token = secrets.token_hex(16)
            server = socket.create_server((job.address.strip("[]"), 0))
            job.tell(topic, f"{server.getsockname()[1]} {token} {job.address}")
            self._start(self._welcome, server, token)
        else:
            port, token, address = job.heard(topic, 0, "the watch").split()
            line = socket.create_connection((address.strip("[]"), int(port)), _PATIENCE_SECONDS)
            line.settimeout(None)
            line.sendall(f"{token} {job.index}\n".encode())
            self._lines[0] = line
            self._start(self._listen, 0, line, line.makefile(errors="replace"))

    def close(self) -> None:
        """Leave without being missed."""
        self._say(_GOODBYE)

    def fail(self, reason: str) -> None:
        """Tell all others that this process ends, and why."""
        self._say(f"process {self._job.index} of {self._job.count} {reason}")

    def ask(self, subject: str) -> None:
        """Tell the others that this process waits for all to agree on something."""
        self._asked += 1
        word = f"{_ASKS}{self._asked} {self._called} {' '.join(subject.split())[:_TOLD]}\n"
        with self._lock:
            self._last_asked = word.encode()
            for line in self._lines.values():
                with contextlib.suppress(OSError):  # it is gone: who listens to it tells
                    line.sendall(self._last_asked)

    def call(self) -> None:
        """Note that a step runs now, and end where another process asks for its plan instead."""
        self._called += 1
        if self._asking:
            self._compare()

    def _compare(self) -> None:
        for process, (asked, called, subject) in list(self._asking.items()):
            if self._asked >= asked:
                self._asking.pop(process, None)
            elif self._called > called:
                reason = (
                    f"ran call {called + 1} with the plan that it had, and process {process} asks "
                    f"for {subject} there: all processes must pass arguments of the same types"
                )
                self.fail(reason)
                self._end(f"process {self._job.index} {reason}")
                return

    def _say(self, text: str) -> None:
        with self._lock:
            self._last_word = f"{text[:_TOLD]}\n"
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            self._leave(line)

    def _leave(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who listens may be gone itself
            line.settimeout(_LAST_WORD_SECONDS)
            line.sendall(self._last_word.encode())
            line.shutdown(socket.SHUT_WR)

    # -- threads ---------------------------------------------------------------------------

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, daemon=True).start()

    def _welcome(self, server: socket.socket, token: str) -> None:
        """Of process 0: a thread for each other process that connects, and knows the token."""
        missing = set(range(1, self._job.count))
        while missing:
            line, _ = server.accept()
            line.settimeout(_PATIENCE_SECONDS)
            words = line.makefile(errors="replace")
            try:
                given, _, number = words.readline().strip().partition(" ")
            except OSError:
                given = number = ""
            line.settimeout(None)
            if given != token or not number.isdigit() or int(number) not in missing:
                words.close()
                line.close()
                continue
            missing.discard(int(number))
            with self._lock:
                is_late = bool(self._last_word)  # it is told now what it has missed
                if not is_late:
                    self._lines[int(number)] = line
                    with contextlib.suppress(OSError):
                        line.sendall(self._last_asked)
            if is_late:
                self._leave(line)
            self._start(self._listen, int(number), line, words)
        server.close()

    def _listen(self, process: int, line: socket.socket, words: TextIO) -> None:
        """Wait for the last word of a process, which may be none."""
        with line, words:
            word = ""
            try:
                for said in words:
                    word = said.strip()
                    if word.startswith(_ASKS):
                        asked, called, subject = word.removeprefix(_ASKS).split(" ", 2)
                        self._asking[process] = int(asked), int(called), subject
                        self._compare()
                        word = ""
            except OSError:
                word = ""
            with self._lock:
                was_held = self._lines.pop(process, None) is not None
        if word == _GOODBYE or not was_held:
            return
        lost = word or (
            f"process {process} of {self._job.count} was lost: it was killed, ran out of memory, "
            "or its host is gone"
        )
        if self._job.index == 0:
            self._say(lost)
        if STANDS_STILL in lost:  # it may be this process that all others wait for
            sys.stderr.write("autopar: the others wait, and this process is here:\n")
            faulthandler.dump_traceback()
        self._end(f"{lost}; process {self._job.index} ends with it")


def watch_over(job: Watched) -> Watch:
    """A watch for as long as this process lives: an exception that ends it is told to all."""
    watch = Watch(job)
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        if issubclass(kind, jax.errors.JaxRuntimeError):
            # Mostly the consequence of a loss, of which the watch tells in a moment and ends this.
            time.sleep(_LAST_WORD_SECONDS)
        lines = str(error).strip().splitlines() or [""]
        watch.fail(f"raised {kind.__name__}: {lines[0]}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_CODE)  # JAX would wait for the others at its exit, for minutes

    sys.excepthook = hook
    atexit.register(watch.close)
    return watch
