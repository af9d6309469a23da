"""Tells what planning and compiling are at: in the log, and on a line where somebody looks on."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import StagePlan
from autopar.ir.text import show_seconds
from autopar.passes.base import Watcher

LOGGER = logging.getLogger("autopar")
_CLEARED = "\r\x1b[2K"  # the line of a terminal


@dataclass
class Progress:
    """The progress of planning and compiling: INFO records, and a line that the next replaces."""

    step: str
    has_line: bool
    _best: float = field(default=float("inf"), init=False)

    def say(self, text: str) -> None:
        """Tell what is being done."""
        LOGGER.info("%s: %s", self.step, text)
        if self.has_line:
            sys.stderr.write(f"{_CLEARED}{self.step}: {text}")
            sys.stderr.flush()

    @property
    def watcher(self) -> Watcher:
        """The watcher to hand to the planner."""
        return Watcher(after=self._after)

    def _after(self, slot: str, given: object, made: object, seconds: float) -> None:
        took = show_seconds(seconds)
        if slot == "trace" and isinstance(made, Graph):
            self.say(f"traced {made.op_count} ops in {took}, planning")
        elif slot == "shard" and isinstance(made, ShardingPlan):
            costs = made.outcome.seconds
            self._best = min(self._best, costs)
            best = f"; the least so far is {show_seconds(self._best)}"
            self.say(f"({made.mesh}): {show_seconds(costs)} a step, found in {took}{best}")
        elif slot == "mesh":
            self.say(f"mesh {given} tried")
        elif slot == "stage" and not isinstance(made, StagePlan):
            self.say(f"stages searched in {took}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.has_line:
            sys.stderr.write(_CLEARED)
            sys.stderr.flush()


@contextmanager
def progress(step: str, doing: str, has_line: bool = True) -> Generator[Progress]:
    """Progress on a step while something is done, with how long that took.

    Only a terminal has a line, and only where nothing else draws on it.
    """
    told = Progress(step, has_line and sys.stderr.isatty())
    start = time.perf_counter()
    told.say(doing)
    try:
        yield told
    except BaseException as error:
        LOGGER.info("%s: %s ended by %s", step, doing, type(error).__name__)
        raise
    else:
        LOGGER.info("%s: %s took %s", step, doing, show_seconds(time.perf_counter() - start))
    finally:
        told.close()
