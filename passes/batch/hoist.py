"""Sums that are made of the batch alone are taken over the whole of it before the loop."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.batching import Hoist
from autopar.ir.graph import Graph
from autopar.passes.batch.phases import Phases, bare_values, read_phases
from autopar.passes.batch.spread import Spread


def hoisted_phases(spread: Spread) -> tuple[Phases, tuple[str, ...]]:
    """The phases with as few loops as hoisting gives, and the values that are hoisted.

    A value of the whole batch that a loop reads is hoisted where no parameter is in the sums it
    is made of: a mask's count, a number of tokens, the mean of the inputs.
    """
    known: tuple[str, ...] = ()
    while True:
        phases = read_phases(spread, known)
        bare = bare_values(phases.graph, spread.graphs.whole, known)
        found = _bare_sums(phases, bare)
        if not found:
            return phases, known
        order = phases.makers
        known = tuple(sorted({*known, *found}, key=lambda name: (order[name], name)))


def _bare_sums(phases: Phases, bare: Collection[str]) -> frozenset[str]:
    found: set[str] = set()
    for value in dict.fromkeys(r.value for r in phases.reentries):
        sums = phases.sums_behind(value)
        if sums and all(name in bare for name in sums):
            found |= sums
    return frozenset(found)


def hoist(whole: Graph, values: tuple[str, ...]) -> Hoist | None:
    """The ops of the whole batch's step that make these values; None where there are none."""
    if not values:
        return None
    needed, ops = set(values), list[int]()
    for i in range(len(whole.ops) - 1, -1, -1):
        op = whole.ops[i]
        if any(v.name in needed for v in op.results):
            ops.append(i)
            needed.update(op.value_operands())
    ops.reverse()
    inputs = tuple(i for i in whole.inputs if i.value.name in needed)
    graph = Graph(f"{whole.name}_hoist", inputs, tuple(whole.ops[i] for i in ops), values)
    return Hoist(graph, values, tuple(ops))
