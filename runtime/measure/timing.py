"""The number of runs that time a program, and the seconds that they give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Repeats:
    """A program runs `least` times, and up to `most` until `seconds` are over."""

    least: int
    most: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """The median seconds of an op in a program that repeats it, over `count` runs of the program.

    `spread` is relative: a robust standard deviation of a run over its median.
    """

    seconds: float
    spread: float
    count: int
