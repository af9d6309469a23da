"""The step cut so that microbatches add up to exactly what the whole batch gives, or refused.

Each op runs for every microbatch, or once; sums over rows are added up over the microbatches, and
nothing is ever divided by how many there are. Wherever a loop reads what is known only after
another, the cheapest remedy is taken, in this order: take the sum over the whole batch first,
where no parameter is in it; multiply sums by it afterwards, where it only scales them; run loops
one after the other, where nothing is left over from one to the next; run all forwards before all
backwards. What none of these mends is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import BatchGraphs, Batching, Rescale, Rows
from autopar.passes.base import Setting
from autopar.passes.batch.base import AbstractBatching
from autopar.passes.batch.facts import Fault, Share, Why
from autopar.passes.batch.hoist import hoist, hoisted_phases
from autopar.passes.batch.loops import Placement, place
from autopar.passes.batch.phases import Phases, bare_values
from autopar.passes.batch.refuse import reentry_faults, reentry_text, refused, statistic_text
from autopar.passes.batch.rescale import rescales_of
from autopar.passes.batch.spread import Spread
from autopar.passes.batch.tags import cut_of, odd_ops

_BARRIER_LOOPS = 2


@dataclass(frozen=True)
class Exact(AbstractBatching):
    """Exact microbatches; `barrier` says whether all forwards may come before all backwards."""

    name: ClassVar[str] = "exact"
    barrier: bool = True

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The cut, verified op by op. Raises BatchError with every reason against it."""
        del setting
        if given.microbatches == 1:
            return Batching.whole(given.part)
        spread, odd = _read_together(given)
        phases, known = hoisted_phases(spread)
        _refuse_if(given, [*spread.faults, *odd, *_output_faults(phases)])
        placed = place(phases, bare_values(phases.graph, given.whole, known))
        _refuse_if(given, [] if _has_results(phases, placed) else [_nothing(given)])
        rescales = rescales_of(spread, phases, known, placed.accumulators)
        if not rescales:
            _refuse_if(given, list(self._loop_faults(phases, placed)))
        return Batching(
            graph=given.part,
            microbatches=given.microbatches,
            batch=spread.cut.batch,
            moments=placed.moments,
            rows=tuple(_rows(phases)),
            accumulators=placed.accumulators,
            hoist=hoist(given.whole, known),
            loops=phases.loops,
            barrier=bool(placed.crossing),
            index=given.index,
            rescales=rescales,
            notes=tuple(_notes(phases, known, placed, rescales)),
        )

    def _loop_faults(self, phases: Phases, placed: Placement) -> Iterator[Fault]:
        """Re-entries that the loops as placed do not bear out."""
        if not placed.crossing:
            return
        between = all(map(phases.is_between_passes, phases.reentries))
        if not between or phases.loops > _BARRIER_LOOPS:
            yield from reentry_faults(phases)
        elif not self.barrier:
            yield from (Fault(Why.BARRIER, reentry_text(phases, r)) for r in phases.reentries)


def _read_together(given: BatchGraphs) -> tuple[Spread, list[Fault]]:
    """What reads both traces, which are op for op alike, and constants in which they differ."""
    cut = cut_of(given)
    if isinstance(cut, Fault):
        raise refused(given.part.name, [cut])
    odd = list(odd_ops(given.whole, given.part, cut.quiet))
    _refuse_if(given, [fault for fault in odd if fault.why is Why.STRUCTURE])
    return Spread(given, cut), odd


def _refuse_if(given: BatchGraphs, faults: Sequence[Fault]) -> None:
    if faults:
        raise refused(given.part.name, faults)


def _rows(phases: Phases) -> Iterator[tuple[str, Rows]]:
    for name, state in phases.states.items():
        if state.fact.rows is not None:
            yield name, state.fact.rows


def _output_faults(phases: Phases) -> Iterator[Fault]:
    graph = phases.graph
    paths = graph.output_paths or ("",) * len(graph.outputs)
    for operand, path in zip(graph.outputs, paths, strict=True):
        if isinstance(operand, str) and phases.states[operand].fact.share is Share.OWN:
            text = f"output {path} is {graph.values[operand]}: each microbatch has one of its own"
            yield Fault(Why.COUPLED, text)


def _has_results(phases: Phases, placed: Placement) -> bool:
    """Whether anything that is returned depends on the batch."""
    outputs = [o for o in phases.graph.outputs if isinstance(o, str)]
    return bool(placed.accumulators) or any(phases.states[o].fact.is_own for o in outputs)


def _nothing(given: BatchGraphs) -> Fault:
    paths = ", ".join(given.part.output_paths[:4])
    return Fault(Why.NOTHING, f"outputs {paths} are the same for every batch")


# -- notes ---------------------------------------------------------------------------------


def _notes(
    phases: Phases, known: Sequence[str], placed: Placement, rescales: Sequence[Rescale]
) -> Iterator[str]:
    for name in known:
        yield f"{statistic_text(phases, name)} is taken of the whole batch first"
    for rescale in rescales:
        value = phases.graph.values[rescale.value]
        count = len(rescale.accumulators)
        yield f"{value} only scales {count} sums: they may be multiplied by it after the loop"
    if placed.crossing:
        for reentry in phases.reentries:
            yield f"all forwards come before all backwards: {reentry_text(phases, reentry)}"
    elif phases.loops > 1:
        yield f"{phases.loops} loops one after the other; every schedule"
    else:
        yield "1 loop; every schedule"
