"""The whole batch as the only microbatch: exact for every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import BatchGraphs, Batching, moments_of_one
from autopar.ir.values import Role
from autopar.passes.base import AbstractBatching, Setting


@dataclass(frozen=True)
class Whole(AbstractBatching):
    """Leaves the step as the user wrote it: one program."""

    name: ClassVar[str] = "whole"

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The whole step, run once."""
        del setting
        return Batching.whole(given.whole)


# -- for stage programs ----------------------------------------------------------------------


@dataclass(frozen=True)
class OneMicrobatch(AbstractBatching):
    """Runs each loop once, then its update; nothing is combined with anything."""

    name: ClassVar[str] = "one"

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The step in loops of one microbatch."""
        del setting
        graph = given.whole
        moments = moments_of_one(graph)
        # The batch has the size that most of its arrays begin with.
        rows = [i.value for i in graph.inputs if i.role is Role.BATCH]
        sizes = [value.shape[0] for value in rows if value.shape]
        return Batching(
            graph,
            batch=max(set(sizes), key=lambda n: (sizes.count(n), n), default=1),
            moments=moments,
            loops=1 + max((m.loops[0] for m in moments if m.loops), default=0),
            notes=("one microbatch: the whole batch, exact for every step",),
        )
