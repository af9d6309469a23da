"""Tells what planning, compiling and measuring are at: in the log, and on a line of a terminal.

INFO autopar: train_step: (data=8): 2.1 ms a step, found in 0.4 s; the best so far is 2.1 ms
⠙ train_step: mesh 3 of 9 tried; the best so far is 2.1 ms  ━━━━╺━━━━━━━━ 3/9 0:00:12
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import StagePlan
from autopar.ir.text import show_seconds
from autopar.passes.base import Watcher

if TYPE_CHECKING:
    from rich.progress import Progress as Lines

LOGGER = logging.getLogger("autopar")
# The lines that are on the terminal; never longer than what they tell of.
_SHOWN: ContextVar[Lines | None] = ContextVar("shown", default=None)


class Progress:
    """The progress of one thing: INFO records, and a line that goes away with it."""

    def __init__(self, subject: str, lines: Lines | None) -> None:
        self._subject, self._lines = subject, lines
        self._task = lines.add_task(subject, total=None) if lines is not None else None
        self._best = float("inf")

    def say(self, text: str) -> None:
        """Tell what is being done."""
        LOGGER.info("%s: %s", self._subject, text)
        self._show(text)

    def count(self, done: int, total: int, doing: str) -> None:
        """Tell how many things are done, of how many, and what is next."""
        LOGGER.info("%s: %d of %d done, %s", self._subject, done, total, doing)
        self._show(doing, done, total)

    def _show(self, text: str, done: int | None = None, total: int | None = None) -> None:
        if self._lines is not None and self._task is not None:
            text = f"{self._subject}: {text}"
            self._lines.update(
                self._task, description=text, completed=done, total=total, refresh=True
            )

    def close(self) -> None:
        """Take the line away."""
        if self._lines is not None and self._task is not None:
            self._lines.remove_task(self._task)

    @property
    def watcher(self) -> Watcher:
        """The watcher to hand to the planner."""
        return Watcher(after=self._after)

    def _after(self, slot: str, given: object, made: object, seconds: float) -> None:
        took = show_seconds(seconds)
        if slot == "trace" and isinstance(made, Graph):
            self.say(f"traced {made.op_count} ops in {took}")
        elif slot == "shard" and isinstance(made, ShardingPlan):
            costs = made.outcome.seconds
            self._best = min(self._best, costs)
            self.say(f"({made.mesh}): {show_seconds(costs)} a step, found in {took}{self._so_far}")
        elif slot == "mesh" and isinstance(given, str):
            done, _, total = given.partition(" of ")
            LOGGER.info("%s: mesh %s tried", self._subject, given)
            self._show(f"mesh {given} tried{self._so_far}", int(done), int(total))
        elif slot == "stage" and not isinstance(made, StagePlan):
            self.say(f"stages searched in {took}")

    @property
    def _so_far(self) -> str:
        known = self._best < float("inf")
        return f"; the best so far is {show_seconds(self._best)}" if known else ""


@contextmanager
def progress(subject: str, doing: str) -> Generator[Progress]:
    """Progress on a subject while something is done, with how long that took.

    Only a terminal has a line: what is done and left, and the time that it has taken. What is done
    within something else has a line below it.
    """
    start = time.perf_counter()
    with _lines() as lines:
        told = Progress(subject, lines)
        told.say(doing)
        try:
            yield told
        except BaseException as error:
            LOGGER.info("%s: %s ended by %s", subject, doing, type(error).__name__)
            raise
        finally:
            told.close()
    LOGGER.info("%s: %s took %s", subject, doing, show_seconds(time.perf_counter() - start))


@contextmanager
def _lines() -> Generator[Lines | None]:
    """The lines on the terminal: those that are there, or new ones that vanish in the end."""
    lines = _SHOWN.get()
    if lines is not None or not sys.stderr.isatty():
        yield lines
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(16),
        bars.MofNCompleteColumn(), bars.TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with bars.Progress(*columns, console=console, transient=True) as lines:
        token = _SHOWN.set(lines)
        try:
            yield lines
        finally:
            _SHOWN.reset(token)
