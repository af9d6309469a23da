"""A training run drawn for a terminal: how its first steps compare, and what it learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.report.style import ACCENT, BAD, GOOD, QUIET, facts, sparkline
from autopar.report.table import Table


@dataclass(frozen=True)
class Line:
    """A compared figure: what it is, how far apart, how far by rounding alone, the limit."""

    what: str
    found: float
    rounding: float
    limit: float


@dataclass(frozen=True)
class Learnt:
    """The losses of a run and what they are to be judged by, in nats a byte."""

    losses: tuple[float, ...]
    held_out: float
    unigram: float
    seconds: float

    @property
    def holds(self) -> bool:
        """True if more was learnt than how often each byte occurs."""
        return self.held_out < self.unigram


def comparison(
    losses: tuple[tuple[float, float], ...], lines: tuple[Line, ...], holds: bool
) -> RenderableType:
    """The first losses side by side, then how far apart the states are, beside pure rounding."""
    first = Table(
        "The first steps",
        (">step", ">loss, 8 devices", ">loss, plain"),
        [(str(i), f"{found:.6f}", f"{plain:.6f}") for i, (found, plain) in enumerate(losses, 1)],
    )
    apart = Table(
        "Relative difference after them",
        ("of", ">autopar", ">rounding alone", ">limit"),
        [
            (
                line.what,
                Text(f"{line.found:.1e}", style=GOOD if line.found <= line.limit else BAD),
                f"{line.rounding:.1e}",
                f"{line.limit:.1e}",
            )
            for line in lines
        ],
    )
    note = Text(
        "Rounding alone: the plain step against itself, with the rows of each batch in another "
        "order.",
        style=QUIET,
    )
    said = ("the steps equal the plain ones to rounding", "the steps DIFFER from the plain ones")
    return Group(first, Text(), apart, note, _verdict(holds, *said))


def learnt(run: Learnt) -> RenderableType:
    """The loss as a line, and the held-out loss beside what byte frequencies alone would give."""
    held, unigram = run.held_out, run.unigram
    said = (
        f"held-out loss is {1 - held / unigram:.0%} below the unigram entropy",
        "held-out loss is NOT below the unigram entropy: train for more steps",
    )
    pairs: list[tuple[str, str | Text]] = [
        ("held-out loss", Text.assemble((_bits(held), "bold"), (f"  {held:.3f} nats", QUIET))),
        ("unigram entropy", Text.assemble(_bits(unigram), (f"  {unigram:.3f} nats", QUIET))),
    ]
    if run.losses:
        first, last = run.losses[0], run.losses[-1]
        curve = Text(sparkline(list(run.losses)), style=ACCENT)
        pairs.insert(0, ("loss", curve + Text(f"  {first:.2f} to {last:.2f} nats")))
        a_step = run.seconds / len(run.losses)
        pairs.append(("training", f"{run.seconds:.0f} s, {a_step:.2f} s a step"))
    title = Text("What it learnt", style=f"bold {ACCENT}")
    return Group(title, facts(pairs), _verdict(run.holds, *said))


def _bits(nats: float) -> str:
    return f"{nats / math.log(2):.3f} bits a byte"


def _verdict(holds: bool, good: str, bad: str) -> Text:
    return (
        Text(f"✓ {good}", style=f"bold {GOOD}") if holds else Text(f"✗ {bad}", style=f"bold {BAD}")
    )
