"""Watches one step as it runs, from threads that wait for what the host has only issued."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from autopar.ir.program import Program, Run, Send
from autopar.runtime.actions import Action
from autopar.runtime.dependencies import makers
from autopar.runtime.feeds import Registers
from autopar.runtime.timeline import SEND, MeasuredSpan, Timeline
from autopar.runtime.window import wait

_Track = tuple[int, int]  # submesh, and for transfers the one they go to; else -1


class Observer:
    """Walks the actions as any step does, and notes when each was issued and when it was done.

    On a track, a submesh or the way from one to another, things end in the order in which they
    were issued: one thread waits for each in turn.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._makers = program, makers(program)
        self._consumed = _consumed_sends(program)

    def walk(self, actions: Sequence[Action], registers: Registers) -> Timeline:
        """Run all actions and wait for them."""
        lanes: dict[_Track, _Lane] = defaultdict(_Lane)
        issued: dict[int, float] = {}
        sent: dict[int, Any] = {}
        ends: dict[int, float] = {}
        begin = time.perf_counter()
        try:
            for number, act in enumerate(actions):
                for send in self._consumed[number]:
                    # Its array is donated here, and nobody can wait for an array that is gone.
                    wait(sent.pop(send))
                issued[number] = time.perf_counter() - begin
                evidence = act(registers)
                if evidence is not None:
                    lanes[self._track(number)].queue.put((number, evidence))
                    sent[number] = evidence
        finally:
            for lane in lanes.values():
                ends.update((n, end - begin) for n, end in lane.finished())
        return Timeline(len(self._program.submeshes), tuple(self._spans(issued, ends)))

    def _track(self, number: int) -> _Track:
        step = self._program.instructions[number]
        return self._program.submesh_of(step), step.target if isinstance(step, Send) else -1

    def _spans(self, issued: dict[int, float], ends: dict[int, float]) -> list[MeasuredSpan]:
        """Each from the moment at which nothing was in its way."""
        spans: list[MeasuredSpan] = []
        free: dict[_Track, float] = {}
        for number in sorted(ends):
            track, end = self._track(number), ends[number]
            before = (ends[m] for m in self._makers[number] if m in ends)
            start = min(end, max([issued[number], free.get(track, 0.0), *before]))
            free[track] = end
            spans.append(self._span(number, start, end))
        return sorted(spans, key=lambda s: (s.kind == SEND, s.submesh))

    def _span(self, number: int, start: float, end: float) -> MeasuredSpan:
        step = self._program.instructions[number]
        if isinstance(step, Run):
            part = self._program.parts[step.part].part
            return MeasuredSpan(
                part.submesh, part.name, part.kind.value, part.stage, step.microbatch, start, end
            )
        assert isinstance(step, Send)
        name = f"{SEND} to mesh{step.target}"
        return MeasuredSpan(step.source, name, SEND, -1, step.microbatch, start, end, step.target)


class _Lane:
    """A thread that waits for arrays in order and notes when each was there."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._ends: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while (item := self.queue.get()) is not None:
            number, array = item
            wait(array)
            self._ends.append((number, time.perf_counter()))

    def finished(self) -> list[tuple[int, float]]:
        """(instruction, when it was done), once all are."""
        self.queue.put(None)
        self._thread.join()
        return self._ends


def _consumed_sends(program: Program) -> tuple[tuple[int, ...], ...]:
    """For each instruction the sends whose first array it donates."""
    arrived: dict[tuple[int, int], int] = {}
    found: list[tuple[int, ...]] = []
    for number, step in enumerate(program.instructions):
        taken: list[int] = []
        if isinstance(step, Send):
            arrived[step.target, step.parcels[0].target] = number
        elif isinstance(step, Run):
            part = program.parts[step.part]
            given = [(part.part.submesh, step.inputs[i]) for i in part.donated]
            taken = [arrived.pop(place) for place in given if place in arrived]
        found.append(tuple(taken))
    return tuple(found)
