"""Exact microbatches: cut a step so that they add up to what the whole batch gives, or refuse it.

Theorem. If (a) ops with rows work row by row, (b) sums over rows are commutative monoids, (c) rows
that begin in the step are those of the whole batch and (d) so are its constants, then N passes over
the microbatches, which accumulate each sum and run every other op once, give what the whole batch
gives, up to the order of additions. Nothing is ever divided by the number of microbatches.

    N = 1 + the largest phase of an op with rows        (see `phases`)

With N = 1 any schedule is exact. Else a loop reads a sum that only an earlier one completes, and
the first of these remedies is taken that mends it:

    R1 hoist      no parameter is in the sum (a mask's count): take it over the whole batch first
    R2 rescale    the sum only scales the gradients: multiply the accumulators by it afterwards
    R6 loops      nothing but inputs crosses from one loop to the next: run them one after the other
    R3 barrier    forwards make the sum, backwards read it: run all forwards before all backwards
    R4, R5        else refuse (`refuse`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.batching import BatchGraphs, Batching, Rescale, moments_of_one
from autopar.ir.values import Role
from autopar.passes.base import AbstractBatching, Setting
from autopar.passes.batch.lattice import Share
from autopar.passes.batch.phases import (
    Phases,
    Placement,
    Reentry,
    find_rescales,
    hoist_graph,
    hoist_sums,
    parameter_free_values,
    place_ops,
    readers_of,
)
from autopar.passes.batch.refuse import Fault, Why, describe, refusal
from autopar.passes.batch.trace_alignment import compare_traces, find_batch_cut
from autopar.passes.batch.transfer import TransferFunctions
from autopar.rules import primitive

_BARRIER_LOOPS = 2


@dataclass(frozen=True)
class Exact(AbstractBatching):
    """Exact microbatches; `barrier` is true if all forwards may come before all backwards."""

    name: ClassVar[str] = "exact"
    barrier: bool = True

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """Cut the step, verified op by op. Raises BatchError with the reasons against it."""
        del setting
        if given.microbatches == 1:
            return Batching.whole(given.part)
        # 1. (c), (d): the two traces are alike, and differ in the sizes of rows alone: E1 to E3.
        #    Constants that differ are told together with the faults of step 2.
        cut = find_batch_cut(given)
        if isinstance(cut, Fault):
            raise refusal(given.part.name, [cut])
        odd = list(compare_traces(given.whole, given.part, cut.source_only))
        _refuse_if(given, [fault for fault in odd if fault.why is Why.STRUCTURE])
        # 2. (a), (b): facts and phases of all values, with R1 until nothing changes: E5 to E10. An
        #    output has rows, or is one for the whole batch, but not a number for each microbatch.
        transfer = TransferFunctions(given, cut)
        phases, known = hoist_sums(transfer)
        paths = given.part.output_paths or ("",) * len(given.part.outputs)
        outputs = [
            (path, given.part.values[operand], phases.states[operand].fact)
            for operand, path in zip(given.part.outputs, paths, strict=True)
            if isinstance(operand, str)
        ]
        local = [
            Fault(Why.COUPLED, f"output {path} is {value}: each microbatch has one of its own")
            for path, value, fact in outputs
            if fact.share is Share.LOCAL
        ]
        _refuse_if(given, [*transfer.faults, *odd, *local])
        # 3. The loop of every op; the accumulators; values that cross from loop to loop (R6). Some
        #    output must depend on the batch: E12.
        placed = place_ops(phases, parameter_free_values(phases.graph, given.whole, known))
        if not placed.accumulators and not any(fact.differs for _, _, fact in outputs):
            text = f"outputs {', '.join(given.part.output_paths[:4])} are the same for every batch"
            raise refusal(given.part.name, [Fault(Why.NOTHING, text)])
        # 4. R2, else R3, else refuse: E4, E6, E11.
        rescales = find_rescales(transfer, phases, known, placed.accumulators)
        if not rescales:
            _refuse_if(given, list(self._loop_faults(phases, placed)))
        return Batching(
            graph=given.part,
            microbatches=given.microbatches,
            batch=cut.batch,
            moments=placed.moments,
            rows=tuple(
                (name, state.fact.rows)
                for name, state in phases.states.items()
                if state.fact.rows is not None
            ),
            accumulators=placed.accumulators,
            hoist=hoist_graph(given.whole, known),
            loops=phases.loops,
            barrier=bool(placed.crossing),
            index=given.index,
            rescales=rescales,
            notes=tuple(_notes(phases, known, placed, rescales)),
        )

    def _loop_faults(self, phases: Phases, placed: Placement) -> Iterator[Fault]:
        """Faults of sums that are read in a loop before they are complete."""
        if not placed.crossing:  # R6
            return
        # R3 needs two loops, forwards and backwards, with all statistics made between them.
        between = all(map(phases.is_between_passes, phases.reentries))
        if not between or phases.loops > _BARRIER_LOOPS:
            yield from _reentry_faults(phases)
        # E4: the schedule asked for mixes them.
        elif not self.barrier:
            yield from (Fault(Why.BARRIER, _reentry_text(phases, r)) for r in phases.reentries)


def _refuse_if(given: BatchGraphs, faults: Sequence[Fault]) -> None:
    if faults:
        raise refusal(given.part.name, faults)


# -- notes ---------------------------------------------------------------------------------


def _notes(
    phases: Phases, known: Sequence[str], placed: Placement, rescales: Sequence[Rescale]
) -> Iterator[str]:
    for name in known:
        yield f"{_statistic_text(phases, name)} is taken of the whole batch first"
    for rescale in rescales:
        value = phases.graph.values[rescale.value]
        count = len(rescale.accumulators)
        yield f"{value} only scales {count} sums: they may be multiplied by it after the loop"
    if placed.crossing:
        for reentry in phases.reentries:
            yield f"all forwards come before all backwards: {_reentry_text(phases, reentry)}"
    elif phases.loops > 1:
        yield f"{phases.loops} loops one after the other; every schedule"
    else:
        yield "1 loop; every schedule"


def _reentry_text(phases: Phases, reentry: Reentry) -> str:
    """Both ends: "the mean over rows %5 (bn.py:12) is subtracted from rows: sub %9 (bn.py:14)"."""
    graph = phases.whole
    made = [_statistic_text(phases, n) for n in sorted(phases.sums_behind(reentry.value))]
    # The op at which the value, spread over the rows, meets them: moves and casts only pass it on.
    readers, use, value = readers_of(graph), graph.ops[reentry.op], reentry.value
    while primitive(use.kind).moves or use.kind == "convert_element_type":
        following = readers.get(use.results[0].name, [])
        if not following:
            break
        use, value = graph.ops[following[0]], use.results[0].name
    is_are = "is" if len(made) == 1 else "are"
    verb = _VERBS.get((use.kind, use.operands.index(value)), "read row by row")
    return f"{' and '.join(made)} {is_are} {verb}: {describe(use)}"


_VERBS = {
    ("add", 0): "added to rows",
    ("add", 1): "added to rows",
    ("add_any", 0): "added to rows",
    ("add_any", 1): "added to rows",
    ("sub", 1): "subtracted from rows",
    ("mul", 0): "multiplied with rows",
    ("mul", 1): "multiplied with rows",
    ("div", 1): "what rows are divided by",
    ("dot_general", 0): "multiplied with rows",
    ("dot_general", 1): "multiplied with rows",
}


def _statistic_text(phases: Phases, name: str) -> str:
    """A result that combines rows: "the mean over rows %5: f32[8] (bn.py:12)"."""
    graph = phases.whole
    op = graph.ops[phases.makers[name]]
    line = f" ({op.origin.line})" if op.origin.line else ""
    combiner = phases.sums[name].combiner
    # A sum that is only divided by a constant is called a mean.
    readers = [graph.ops[i] for i in readers_of(graph).get(name, ())]
    divided = bool(readers) and all(
        op.kind == "div" and op.operands[0] == name and not isinstance(op.operands[1], str)
        for op in readers
    )
    word = "mean" if combiner == "sum" and divided else combiner
    return f"the {word} over rows {graph.values[name]}{line}"


def _reentry_faults(phases: Phases) -> Iterator[Fault]:
    """Faults of re-entries that no order of loops makes exact, those of forward passes first."""
    forward = [r for r in phases.reentries if phases.graph.ops[r.op].origin.region == "forward"]
    # It is a statistic of the model if a backward op waits for it within a loop, else a metric.
    reaches_gradients = any(
        phase and phases.runs_in_loop(i) and phases.graph.ops[i].origin.region == "backward"
        for i, phase in enumerate(phases.phases)
    )
    why = Why.STATISTIC if reaches_gradients else Why.METRIC
    for reentry in forward:
        yield Fault(why, _reentry_text(phases, reentry))
    for text in dict.fromkeys(_reentry_text(phases, r) for r in phases.reentries if not forward):
        yield Fault(Why.DEEP, f"{text}; {phases.loops} passes over the microbatches in all")


# -- one microbatch, for stage programs ------------------------------------------------------------


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
