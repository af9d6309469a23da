"""Which loop every op runs in, what is added up in it, and what one loop leaves to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.batching import FREE, Accumulator, Moment, When
from autopar.ir.graph import Graph
from autopar.ir.values import Value
from autopar.passes.batch.facts import Share
from autopar.passes.batch.phases import Phases

# Sums in these are rounded at each addition, so they are added up in f32.
_NARROW = ("bf16", "f16")
_ONCE = -1  # stands among the loops that read a value for the ops that run once


@dataclass(frozen=True)
class Placement:
    """Moments of all ops, accumulators, and what a later loop reads of each microbatch."""

    moments: tuple[Moment, ...]
    accumulators: tuple[Accumulator, ...]
    crossing: tuple[str, ...]


def place(phases: Phases, bare: Collection[str]) -> Placement:
    """Every op in a loop runs as late as it may, and in several where it is cheap.

    So what only a backward pass reads is not left to it by an earlier loop.
    """
    graph = phases.graph
    cheap = _cheap_ops(phases, bare)
    wanted: dict[str, set[int]] = defaultdict(set)
    moments: list[Moment] = [FREE] * len(graph.ops)
    crossing: list[str] = []
    for i in range(len(graph.ops) - 1, -1, -1):
        op, phase = graph.ops[i], phases.phases[i]
        if phases.whens[i] is When.ONCE:
            moments[i] = Moment(When.ONCE, (phase - 1,))
            if i in phases.live:
                for name in op.value_operands():
                    wanted[name].add(_ONCE)
        if phases.whens[i] is not When.LOOP:
            continue
        readers = set[int]().union(*(wanted[v.name] for v in op.results))
        loops = sorted(_own_loops(phases, i, readers))
        if len(loops) > 1 and i not in cheap:
            crossing += [v.name for v in op.results if _crosses(phases, v, wanted[v.name], loops)]
            loops = loops[:1]
        moments[i] = Moment(When.LOOP, tuple(loops))
        if i in phases.live:
            for name in op.value_operands():
                wanted[name].update(loops)
    accumulators = tuple(_accumulators(phases, moments, wanted))
    return Placement(tuple(moments), accumulators, tuple(crossing))


def _own_loops(phases: Phases, op: int, readers: Collection[int]) -> set[int]:
    """The loops that an op must run in: those that read it, and the one that adds it up."""
    results = phases.graph.ops[op].results
    added = [v.name in phases.sums for v in results]
    alone = bool(added) and all(added)
    loops = {k for k in readers if k != _ONCE and not alone}
    if any(added) or _ONCE in readers or not loops:
        loops.add(min(phases.phases[op], phases.loops - 1))
    return loops


def _crosses(phases: Phases, value: Value, readers: Collection[int], loops: list[int]) -> bool:
    """Whether a later loop reads what an earlier one left for each microbatch."""
    own = phases.states[value.name].fact.is_own and value.name not in phases.sums
    return own and any(k > loops[0] for k in readers)


def _cheap_ops(phases: Phases, bare: Collection[str]) -> frozenset[int]:
    """Ops that any loop may run again: no parameter is in them, or nothing of the batch."""
    cheap: set[int] = set()
    costly = set[str]()
    for i, op in enumerate(phases.graph.ops):
        if phases.whens[i] is not When.LOOP:
            continue
        operands = op.value_operands()
        is_source = not any(phases.states[n].fact.is_own for n in operands)
        is_bare = all(v.name in bare for v in op.results)
        if (is_source or is_bare) and costly.isdisjoint(operands) and not op.graphs:
            cheap.add(i)
        else:
            costly.update(v.name for v in op.results if phases.states[v.name].fact.is_own)
    return frozenset(cheap)


def _accumulators(
    phases: Phases, moments: list[Moment], wanted: Mapping[str, Collection[int]]
) -> Iterator[Accumulator]:
    """Results that are read after the loop that makes them."""
    graph = phases.graph
    returned = {o for o in graph.outputs if isinstance(o, str)}
    for i in filter(phases.runs_in_loop, sorted(phases.live)):
        loops = moments[i].loops
        for value in graph.ops[i].results:
            readers, total = wanted.get(value.name, ()), phases.sums.get(value.name)
            if total is not None and (readers or value.name in returned):
                held = _held_in(value, total.combiner)
                yield Accumulator(value.name, phases.phases[i], total.combiner, held)
            elif total is None and phases.states[value.name].fact.share is Share.SAME:
                if value.name in returned or any(k not in loops for k in readers):
                    yield Accumulator(value.name, loops[0], "same")


def _held_in(value: Value, combiner: str) -> str:
    return "f32" if combiner in ("sum", "mul") and value.dtype in _NARROW else ""


def reading_graph(graph: Graph) -> dict[str, list[int]]:
    """Value name -> the ops that read it, in order."""
    readers: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.value_operands()):
            readers[name].append(i)
    return readers
