"""The watchdog: reports where a step hangs, what each submesh did last and what it waits for."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.program import ONCE, Program, Run
from autopar.runtime.actions import Action
from autopar.runtime.feeds import Registers

_LOOKS = 4  # in one span of patience
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
        """True if all of it is done."""
        return self.is_issued and len(self.done()) == len(self.tokens)


class Watchdog:
    """Looks at the oldest step under way, and reports it once if nothing moves in it for a while.

    The step goes on waiting: what hangs may be slow only. `patience` is in seconds.
    """

    def __init__(self, program: Program, patience: float, report: Callable[[str], Any]) -> None:
        self._program, self._report = program, report
        self._steps: deque[_Step] = deque()
        self._count = 0
        look = threading.Thread(target=_look, args=(weakref.ref(self), patience), daemon=True)
        look.start()

    def walk(self, actions: Sequence[Action], registers: Registers) -> None:
        """Run all actions, under watch."""
        while self._steps and self._steps[0].is_done:
            self._steps.popleft()
        step = _Step(self._count)
        self._count += 1
        self._steps.append(step)
        try:
            for number, act in enumerate(actions):
                evidence = act(registers)
                if isinstance(self._program.instructions[number], Run):
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
            self._report(standstill(self._program, step.done()) + "\n")

    def _oldest(self) -> _Step | None:
        return next((s for s in list(self._steps) if not s.is_done), None)


def _look(watched: weakref.ref[Watchdog], patience: float) -> None:
    """Compares the progress with what it was before, for as long as there is an executor."""
    seen, since = (-1, 0), time.monotonic()
    while True:
        time.sleep(patience / _LOOKS)
        watchdog = watched()
        if watchdog is None:
            return
        now = watchdog.progress()
        if now != seen or now[0] < 0:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= patience:
            watchdog.report_oldest()
        del watchdog


def standstill(program: Program, done: Collection[int]) -> str:
    """The position of each submesh when these runs are done, and the list around what hangs."""
    makes = program.producers
    lines = ["a step makes no progress:"]
    hanging: list[int] = []
    for submesh in range(len(program.submeshes)):
        runs = [
            n
            for n, step in enumerate(program.instructions)
            if isinstance(step, Run) and program.submesh_of(step) == submesh
        ]
        left = [n for n in runs if n not in done]
        before = [n for n in runs if n in done]
        last = _name(program, before[-1]) if before else "nothing"
        if not left:
            lines.append(f"  mesh{submesh}  has done all, {last} last")
            continue
        awaited = _awaited(program, makes, left[0], done)
        if not awaited:
            hanging.append(left[0])
        what = (
            f"waits for {', '.join(_name(program, n) for n in awaited)} to run"
            if awaited
            else "HANGS in"
        )
        following = f", then {_name(program, left[1])}" if len(left) > 1 else ""
        lines.append(f"  mesh{submesh}  did {last}; {what} {_name(program, left[0])}{following}")
    return "\n".join([*lines, *_around(program, hanging)])


def _awaited(
    program: Program, makes: Sequence[Sequence[int]], run: int, done: Collection[int]
) -> list[int]:
    """The runs before this one, sends looked through, that are not done."""
    found: set[int] = set()
    open_ = list(makes[run])
    while open_:
        number = open_.pop()
        if not isinstance(program.instructions[number], Run):
            open_ += makes[number]
        elif number not in done:
            found.add(number)
    return sorted(found)


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
