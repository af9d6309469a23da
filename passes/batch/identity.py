"""The whole batch as the only microbatch: exact for every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import FREE, BatchGraphs, Batching, Moment, When
from autopar.ir.graph import Graph
from autopar.ir.values import Role
from autopar.passes.base import Setting
from autopar.passes.batch.base import AbstractBatching


@dataclass(frozen=True)
class Whole(AbstractBatching):
    """Leaves the step as the user wrote it: one program."""

    name: ClassVar[str] = "whole"

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The whole step, run once."""
        del setting
        return Batching.whole(given.whole)


# -- for stage programs ----------------------------------------------------------------------


_LOOP, _ONCE = Moment(When.LOOP, (0,)), Moment(When.ONCE, (0,))


@dataclass(frozen=True)
class OneMicrobatch(AbstractBatching):
    """Runs forward and backward once, then the update; nothing is combined with anything."""

    name: ClassVar[str] = "one"

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The step in one loop of one microbatch."""
        del setting
        graph = given.whole
        return Batching(
            graph,
            batch=_batch_size(graph),
            moments=tuple(_moments(graph)),
            notes=("one microbatch: the whole batch, exact for every step",),
        )


def _moments(graph: Graph) -> Iterator[Moment]:
    """Put ops that read the batch in the loop, but for updates."""
    touched = {i.value.name for i in graph.inputs if i.role is Role.BATCH}
    for op in graph.ops:
        reads = not touched.isdisjoint(op.value_operands())
        if reads:
            touched.update(r.name for r in op.results)
        yield FREE if not reads else _ONCE if op.origin.region == "update" else _LOOP


def _batch_size(graph: Graph) -> int:
    """The rows of the batch, as far as its arrays agree on them."""
    sizes = [i.value.shape[0] for i in graph.inputs if i.role is Role.BATCH and i.value.shape]
    return max(set(sizes), key=lambda n: (sizes.count(n), n), default=1)
