"""What a step really did: when each program ran and each transfer arrived, as data and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.program import ONCE, PartKind
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
        """How long it took."""
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
        """How long each submesh computed."""
        return tuple(sum(s.seconds for s in row) for row in self.rows)

    @property
    def makespan_bubble(self) -> float:
        """The longest that a submesh does not compute, in seconds."""
        return self.makespan_seconds - min(self.busy_seconds, default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Which part of all the submeshes' time is idle."""
        whole = self.makespan_seconds * self.submeshes
        return 1.0 - sum(self.busy_seconds) / whole if whole else 0.0

    @property
    def rows(self) -> tuple[tuple[MeasuredSpan, ...], ...]:
        """What each submesh computed, in order."""
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
    events += [_event(s, tracks[_track(s)]) for s in timeline.spans]
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
    sends = sorted({_track(s) for s in timeline.spans if s.kind == SEND})
    yield from ((name, tid) for tid, name in enumerate([*meshes, *sends]))


def _track(span: MeasuredSpan) -> str:
    way = f" to mesh{span.target}" if span.kind == SEND else ""
    return f"mesh{span.submesh}{way}"


def _label(span: MeasuredSpan, chunked: bool) -> str:
    """As grids call tasks: F3, or F1.3 where a submesh has several stages; else the part's name."""
    if span.kind not in _LOOP:
        return span.name
    return f"{span.name}.{span.microbatch}" if chunked else f"{span.kind}{span.microbatch}"
