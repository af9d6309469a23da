"""The timeline that XLA's latency-hiding scheduler dumps: when each instruction should run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^computation_schedules \{(.*?)^\}", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"^\s*(\w+): (-?[\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class CompilerTimeline:
    """The makespan of a program's entry and what of it waits for collectives, in seconds."""

    seconds: float
    exposed_seconds: float


def read_timeline(schedule_text: str) -> CompilerTimeline | None:
    """The entry's timeline of a `*.schedule.txt` dump; None where it holds none."""
    last = None
    for last in _computations(schedule_text):
        pass
    return last


def _computations(text: str) -> Iterator[CompilerTimeline]:
    for match in _COMPUTATION.finditer(text):
        numbers = {name: float(value) for name, value in _NUMBER.findall(match.group(1))}
        rate = 1e6 * numbers.get("cycles_per_microsecond", 1.0)
        yield CompilerTimeline(
            numbers.get("total_cycles", 0.0) / rate,
            numbers.get("total_wasted_cycles", 0.0) / rate,
        )
