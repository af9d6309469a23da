"""The timeline of a step that ran: when each program ran and each transfer arrived."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from autopar.ir.program import ONCE, PartKind, Program, Run, Send
from autopar.runtime.actions import Action
from autopar.runtime.feeds import Registers
from autopar.runtime.transport.abstract import wait
from autopar.schedule.picture import Box, Picture

SEND = "send"
_LOOP = tuple(
    k.value
    for k in (
        PartKind.FORWARD,
        PartKind.BACKWARD,
        PartKind.INPUT_GRADIENT,
        PartKind.WEIGHT_GRADIENT,
    )
)


@dataclass(frozen=True)
class MeasuredSpan:
    """A program that ran on a submesh, or a transfer that left it, in seconds of the step.

    It starts when all that it reads is there, the program before it is done and the host has
    issued it. `kind` is a part's, or "send", which goes to submesh `target`.
    """

    submesh: int
    name: str
    kind: str
    stage: int
    microbatch: int
    start_seconds: float
    end_seconds: float
    target: int = -1

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, by submesh in the order in which they ran; transfers last."""

    submeshes: int
    spans: tuple[MeasuredSpan, ...]

    @property
    def loop(self) -> Timeline:
        """The tasks of the schedule alone, from the start of the first: what a simulation has."""
        kept = [s for s in self.spans if s.kind in _LOOP]
        first = min((s.start_seconds for s in kept), default=0.0)
        moved = (
            replace(s, start_seconds=s.start_seconds - first, end_seconds=s.end_seconds - first)
            for s in kept
        )
        return Timeline(self.submeshes, tuple(moved))

    @property
    def makespan_seconds(self) -> float:
        """To the end of the last span."""
        return max((s.end_seconds for s in self.spans), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """The time that each submesh computed."""
        return tuple(sum(s.seconds for s in row) for row in self.rows)

    @property
    def makespan_bubble(self) -> float:
        """The longest that a submesh does not compute, in seconds."""
        return self.makespan_seconds - min(self.busy_seconds, default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The part of all the submeshes' time that is idle."""
        whole = self.makespan_seconds * self.submeshes
        return 1.0 - sum(self.busy_seconds) / whole if whole else 0.0

    @property
    def rows(self) -> tuple[tuple[MeasuredSpan, ...], ...]:
        """The spans that each submesh computed, in order."""
        return tuple(
            tuple(s for s in self.spans if s.submesh == mesh and s.kind != SEND)
            for mesh in range(self.submeshes)
        )

    @property
    def picture(self) -> Picture:
        """The spans as boxes along the axis of time, as simulations are drawn."""
        chunked = any(len({s.stage for s in row if s.kind in _LOOP}) > 1 for row in self.rows)
        return Picture(
            tuple(
                tuple(Box(_label(s, chunked), s.kind, s.start_seconds, s.end_seconds) for s in row)
                for row in self.rows
            )
        )

    def __str__(self) -> str:
        headline = (
            f"measured  p={self.submeshes}  makespan {self.makespan_seconds:.6g} s  "
            f"bubble {self.makespan_bubble:.6g} s"
        )
        return "\n".join([headline, *self.picture.lines()])


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as Chrome's trace events: a track a submesh, and one for each way of sends."""
    tracks = dict(_tracks(timeline))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for name, tid in tracks.items()
    ]
    events += [_event(s, tracks[_track_name(s)]) for s in timeline.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: MeasuredSpan, tid: int) -> dict[str, Any]:
    which = "" if span.microbatch == ONCE else f".{span.microbatch}"
    return {
        "ph": "X",
        "name": f"{span.name}{which}",
        "cat": span.kind,
        "pid": 0,
        "tid": tid,
        "ts": span.start_seconds * 1e6,
        "dur": span.seconds * 1e6,
        "args": {"stage": span.stage, "microbatch": span.microbatch},
    }


def _tracks(timeline: Timeline) -> Iterator[tuple[str, int]]:
    meshes = [f"mesh{m}" for m in range(timeline.submeshes)]
    sends = sorted({_track_name(s) for s in timeline.spans if s.kind == SEND})
    yield from ((name, tid) for tid, name in enumerate([*meshes, *sends]))


def _track_name(span: MeasuredSpan) -> str:
    way = f" to mesh{span.target}" if span.kind == SEND else ""
    return f"mesh{span.submesh}{way}"


def _label(span: MeasuredSpan, chunked: bool) -> str:
    """As grids call tasks: F3, or F1.3 where a submesh has several stages; else the part's name."""
    if span.kind not in _LOOP:
        return span.name
    return f"{span.name}.{span.microbatch}" if chunked else f"{span.kind}{span.microbatch}"


# -- the observer ------------------------------------------------------------------------------


_Track = tuple[int, int]  # submesh, and for transfers the one they go to; else -1


class Observer:
    """Walks the actions as any step does, and notes when each was issued and when it was done.

    On a track, a submesh or the way from one to another, things end in the order in which they
    were issued: one thread waits for each in turn.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._producers = program, program.producers
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
            before = (ends[m] for m in self._producers[number] if m in ends)
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
            arrived[step.target, step.transfers[0].target] = number
        elif isinstance(step, Run):
            part = program.parts[step.part]
            given = [(part.part.submesh, step.inputs[i]) for i in part.donated]
            taken = [arrived.pop(place) for place in given if place in arrived]
        found.append(tuple(taken))
    return tuple(found)
