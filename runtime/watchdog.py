"""The watchdog: where a step hangs, what each submesh did last and what it waits for.

A step that waits for ever says nothing: a process that never sends, a program that never ends. So a
thread looks at what is done of the oldest step under way, and where that stays the same for a while
it reports, which ends the job: a launcher can start it again, and nobody pays for a standstill.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.program import ONCE, Program, Run, Send
from autopar.ir.text import show_seconds
from autopar.runtime.actions import Action
from autopar.runtime.feeds import Registers

PATIENCE_SECONDS = 600.0  # of a pipeline, where nobody says otherwise
_LOOKS = 4  # in one span of patience
_FIRST = 4  # times as long may the first step take
_NEAR = 3  # instructions shown before and after one that hangs


@dataclass
class _Step:
    """A step under way: the token of each run by instruction, in the order of issue."""

    number: int
    tokens: dict[int, Any] = field(default_factory=dict[int, Any])
    is_issued: bool = False
    is_reported: bool = False

    def done(self) -> frozenset[int]:
        """The runs that are done."""
        return frozenset(n for n, token in list(self.tokens.items()) if token.is_ready())

    @property
    def is_done(self) -> bool:
        """True if all of it is done; what ends last, mostly issued last, is asked first."""
        return self.is_issued and all(t.is_ready() for t in reversed(self.tokens.values()))


class Watchdog:
    """Looks at the oldest step under way, and reports it once if nothing in it moves for a while.

    `patience` is in seconds. The first step has several times as long, for other processes may
    still compile.
    """

    def __init__(self, program: Program, patience: float, report: Callable[[str], Any]) -> None:
        self._program, self._report = program, report
        self._runs = [isinstance(step, Run) for step in program.instructions]
        self._steps: deque[_Step] = deque()
        self._count = 0
        self._patience, closed = patience, threading.Event()
        weakref.finalize(self, closed.set)
        watched = weakref.ref(self)
        threading.Thread(target=_look, args=(watched, patience, closed), daemon=True).start()

    def walk(self, actions: Sequence[Action], registers: Registers) -> None:
        """Run all actions, under watch."""
        while self._steps and self._steps[0].is_done:
            self._steps.popleft()
        step = _Step(self._count)
        self._count += 1
        self._steps.append(step)
        try:
            for number, (act, is_run) in enumerate(zip(actions, self._runs, strict=True)):
                evidence = act(registers)
                if is_run:
                    step.tokens[number] = evidence
        finally:
            step.is_issued = True  # of one that is broken off no more will come

    def progress(self) -> tuple[int, int]:
        """The oldest step under way and how many of its runs are done; (-1, 0) where none is."""
        step = self._oldest()
        return (step.number, len(step.done())) if step is not None else (-1, 0)

    def report_oldest(self) -> None:
        """Say where the oldest step stands, unless that was said before."""
        step = self._oldest()
        if step is not None and not step.is_reported:
            step.is_reported = True
            waited = self._waits(step.number)
            self._report(f"{standstill(self._program, step.done(), waited)}\n")

    def _waits(self, step: int) -> float:
        """Seconds that a step may stand still."""
        return self._patience * (_FIRST if step == 0 else 1)

    def is_late(self, step: int, seconds: float) -> bool:
        """True if a step has stood still for too long."""
        return seconds >= self._waits(step)

    def _oldest(self) -> _Step | None:
        return next((s for s in list(self._steps) if not s.is_done), None)


def _look(watched: weakref.ref[Watchdog], patience: float, closed: threading.Event) -> None:
    """Compares the progress with what it was before, for as long as there is an executor."""
    seen, since = (-1, 0), time.monotonic()
    while not closed.wait(patience / _LOOKS):
        watchdog = watched()
        if watchdog is None:
            return
        now = watchdog.progress()
        if now != seen or now[0] < 0:
            seen, since = now, time.monotonic()
        elif watchdog.is_late(now[0], time.monotonic() - since):
            watchdog.report_oldest()
        del watchdog


def standstill(program: Program, done: Collection[int], seconds: float) -> str:
    """The position of each submesh when these runs are done, and the list around what hangs.

    The program may be a process's part of one, in which arrays come from runs of others.
    """
    makes = program.producers
    lines = [f"a step has made no progress for {show_seconds(seconds)}:"]
    hanging: list[int] = []
    own = [
        [
            n
            for n, step in enumerate(program.instructions)
            if isinstance(step, Run) and program.submesh_of(step) == submesh
        ]
        for submesh in range(len(program.submeshes))
    ]
    for submesh, runs in enumerate(own):
        if not runs:
            lines.append(f"  mesh{submesh}  is another process's")
            continue
        left = [n for n in runs if n not in done]
        before = [n for n in runs if n in done]
        last = _name(program, before[-1]) if before else "nothing"
        if not left:
            lines.append(f"  mesh{submesh}  has done all, {last} last")
            continue
        awaited, senders = _awaited(program, makes, left[0], done)
        senders = [s for s in senders if not own[s]]
        if not awaited:
            hanging.append(left[0])
        name = _name(program, left[0])
        what = f"HANGS in {name}"
        if awaited:
            what = f"waits for {', '.join(_name(program, n) for n in awaited)} to run {name}"
        elif senders:
            what += f", or waits for what mesh{senders[0]} sends to it"
        following = f", then {_name(program, left[1])}" if len(left) > 1 else ""
        lines.append(f"  mesh{submesh}  did {last}; {what}{following}")
    return "\n".join([*lines, *_around(program, hanging)])


def _awaited(
    program: Program, makes: Sequence[Sequence[int]], run: int, done: Collection[int]
) -> tuple[list[int], list[int]]:
    """The runs before this one, sends looked through, that are not done; who sends what."""
    found: set[int] = set()
    senders: set[int] = set()
    open_ = list(makes[run])
    while open_:
        number = open_.pop()
        step = program.instructions[number]
        if isinstance(step, Send):
            senders.add(step.source)
        if not isinstance(step, Run):
            open_ += makes[number]
        elif number not in done:
            found.add(number)
    return sorted(found), sorted(senders)


def _around(program: Program, hanging: Collection[int]) -> list[str]:
    """The instructions near those that hang, which are marked."""
    shown = {n for h in hanging for n in range(h - _NEAR, h + _NEAR + 1)}
    return [
        f"{'>' if number in hanging else ' '} {line}"
        for number, line in enumerate(str(program).splitlines())
        if number in shown
    ]


def _name(program: Program, number: int) -> str:
    step = program.instructions[number]
    assert isinstance(step, Run)
    name = program.parts[step.part].part.name
    return name if step.microbatch == ONCE else f"{name}.{step.microbatch}"
