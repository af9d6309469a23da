"""Scalars of the whole batch that only multiply what a loop adds up: it may do without them."""

from __future__ import annotations

from autopar.ir.batching import Accumulator, Rescale
from autopar.passes.batch.phases import Phases, read_phases
from autopar.passes.batch.spread import Spread


def rescales_of(
    spread: Spread, phases: Phases, known: tuple[str, ...], accumulators: tuple[Accumulator, ...]
) -> tuple[Rescale, ...]:
    """The rewritings that save loops: the derivative of the log of a mean, a loss's own scale.

    A scalar qualifies where every accumulator that it reaches is its multiple, and no value that
    the loops hand out by rows or as they are depends on it.
    """
    handed = set(phases.graph.outputs)
    scalars = dict.fromkeys(r.value for r in phases.reentries)
    sums = {a.value: phases.sums[a.value] for a in accumulators if a.value in phases.sums}
    others = [phases.states[a.value].fact for a in accumulators if a.value not in phases.sums]
    others += [phases.states[o].fact for o in handed if isinstance(o, str) and o not in sums]
    found: list[Rescale] = []
    for scalar in scalars:
        reached = tuple(name for name, fact in sums.items() if scalar in fact.scalars)
        clean = all(scalar in sums[name].multiple_of for name in reached)
        if reached and clean and not any(scalar in f.scalars for f in others):
            found.append(Rescale(scalar, reached))
    if not found:
        return ()
    saved = read_phases(spread, (*known, *(r.value for r in found)))
    return tuple(found) if saved.loops < phases.loops else ()
