"""The whole batch as the only microbatch: exact for every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import FREE, BatchGraphs, Batching, Moment, When
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
        rows = [i.value for i in graph.inputs if i.role is Role.BATCH]
        # Ops that read the batch are in the loop, but for the update.
        touched, moments = {value.name for value in rows}, list[Moment]()
        for op in graph.ops:
            reads = not touched.isdisjoint(op.value_operands())
            if reads:
                touched.update(r.name for r in op.results)
            once = op.origin.region == "update"
            moments.append(FREE if not reads else _ONCE if once else _LOOP)
        # The batch has the size that most of its arrays begin with.
        sizes = [value.shape[0] for value in rows if value.shape]
        return Batching(
            graph,
            batch=max(set(sizes), key=lambda n: (sizes.count(n), n), default=1),
            moments=tuple(moments),
            notes=("one microbatch: the whole batch, exact for every step",),
        )
