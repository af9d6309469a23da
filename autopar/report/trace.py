"""Reads the trace of a measured step, in Chrome's form, as `ParallelStep.trace` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import InputError
from autopar.ir.json_reader import Json, Reader

SEND = "send"
_TRACK = re.compile(r"mesh(\d+)")


@dataclass(frozen=True)
class TracedSpan:
    """A program that ran on a submesh, or a transfer ("send") that left it; seconds of the step."""

    submesh: int
    name: str
    kind: str
    stage: int
    microbatch: int
    start_seconds: float
    end_seconds: float

    @property
    def is_transfer(self) -> bool:
        """Whether it is a transfer, which keeps no device busy."""
        return self.kind == SEND


def load_trace(path: Path) -> tuple[TracedSpan, ...]:
    """The spans of a file; raises InputError where it cannot be read or is no trace."""
    try:
        return read_trace(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from None


def read_trace(text: str, where: str) -> tuple[TracedSpan, ...]:
    """The spans of a trace by submesh, as they ran; raises InputError where it is none of ours."""
    try:
        data: Json = json.loads(text)
        spans = tuple(_spans(Reader(data)))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{where} is no trace of a step: {error}. Give the file that step.trace(PATH) writes."
        ) from None
    if not spans:
        raise InputError(f"{where} has no span of a step that ran: trace a step again.")
    return tuple(sorted(spans, key=lambda s: (s.submesh, s.start_seconds, s.name)))


def _spans(data: Reader) -> Iterator[TracedSpan]:
    events = [Reader(event) for event in data.items("traceEvents")]
    tracks = {e.whole("tid"): e.inner("args").text("name") for e in events if e.text("ph") == "M"}
    for event in events:
        if event.text("ph") != "X":
            continue
        track = _TRACK.match(tracks[event.whole("tid")])
        if track is None:
            raise ValueError(f"track {tracks[event.whole('tid')]!r} is no submesh")
        args, start = event.inner("args"), event.number("ts") / 1e6
        yield TracedSpan(
            int(track[1]), event.text("name"), event.text("cat"), args.whole("stage"),
            args.whole("microbatch"), start, start + event.number("dur") / 1e6,
        )  # fmt: skip
