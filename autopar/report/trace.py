"""Reads the trace of a measured step, in Chrome's form, as `ParallelStep.trace` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import InputError
from autopar.ir.codec import Fields, Item, JsonError, parse_json
from autopar.ir.text_file import read_text

SEND = "send"
_TRACK = re.compile(r"mesh(\d{1,6})(?!\d)")


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
        """True if it is a transfer, which keeps no device busy."""
        return self.kind == SEND


def load_trace(path: Path) -> tuple[TracedSpan, ...]:
    """The spans of a file; raises InputError where it cannot be read or is no trace."""
    return read_trace(read_text(path, "a trace"), str(path))


def read_trace(text: str, where: str) -> tuple[TracedSpan, ...]:
    """The spans of a trace by submesh, as they ran; raises InputError where it is none of ours."""
    try:
        spans = tuple(_spans(Item(parse_json(text)).fields()))
    except JsonError as error:
        raise InputError(
            f"{where} is no trace of a step: {error}. Give the file that step.trace(PATH) writes."
        ) from None
    if not spans:
        raise InputError(f"{where} has no span of a step that ran: trace a step again.")
    return tuple(sorted(spans, key=lambda s: (s.submesh, s.start_seconds, s.name)))


def _spans(data: Fields) -> Iterator[TracedSpan]:
    events = [item.fields() for item in data["traceEvents"].items()]
    tracks = {e["tid"].whole(): e["args"].fields()["name"] for e in events if e["ph"].text() == "M"}
    for event in events:
        if event["ph"].text() != "X":
            continue
        name = tracks.get(event["tid"].whole())
        track = _TRACK.match(name.text()) if name is not None else None
        if track is None:
            event["tid"].fail("the track of a submesh")
        args, start, length = event["args"].fields(), event["ts"].number(), event["dur"].number()
        if start < 0 or length < 0:
            event["dur"].fail("a time from 0 on")
        yield TracedSpan(
            int(track[1]), event["name"].text(), event["cat"].text(), args["stage"].whole(),
            args["microbatch"].whole(), start / 1e6, (start + length) / 1e6,
        )  # fmt: skip
