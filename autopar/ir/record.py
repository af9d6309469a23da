"""The step that a plan was made for, kept as text, so that the plan can be questioned by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.batching import Accumulator, Batching, Hoist, Moment, Rows
from autopar.ir.codec import ByName, Text
from autopar.ir.graph import Graph
from autopar.ir.parse import parse_graph


@dataclass(frozen=True)
class Cutting:
    """The microbatches of a step: a `Batching` without its graphs.

    `hoist` is the text of what is computed on the whole batch, "" where nothing is.
    """

    microbatches: int
    batch: int
    moments: tuple[Moment, ...]
    rows: ByName[Rows]
    accumulators: tuple[Accumulator, ...]
    loops: int
    barrier: bool
    index: str
    hoist: Text = ""
    hoisted: tuple[str, ...] = ()
    hoist_equations: tuple[int, ...] = ()

    def hoisted_graph(self) -> Hoist | None:
        """The part that the whole batch decides, where anything is hoisted."""
        if not self.hoist:
            return None
        return Hoist(parse_graph(self.hoist), self.hoisted, self.hoist_equations)


@dataclass(frozen=True)
class Record:
    """The graph that was planned, as it prints without rules, and the user's own rules.

    With stages or microbatches the graph is that of one microbatch, and `cutting` tells the rest.
    """

    graph: Text
    rules: ByName[str] = ()
    cutting: Cutting | None = None

    @classmethod
    def of(cls, batching: Batching, rules: Mapping[str, str]) -> Record:
        """The record of a step; a step that is left whole is its graph."""
        text = str(_bare(batching.graph))
        pairs = tuple(sorted(rules.items()))
        return cls(text, pairs, None if batching.is_whole else _cutting(batching))

    @cached_property
    def batching(self) -> Batching:
        """The step again, its ops without rules; raises GraphSyntaxError where the text is none."""
        graph, cut = parse_graph(self.graph), self.cutting
        if cut is None:
            return Batching.whole(graph)
        return Batching(
            graph=graph,
            microbatches=cut.microbatches,
            batch=cut.batch,
            moments=cut.moments,
            rows=cut.rows,
            accumulators=cut.accumulators,
            hoist=cut.hoisted_graph(),
            loops=cut.loops,
            barrier=cut.barrier,
            index=cut.index,
        )


def _cutting(batching: Batching) -> Cutting:
    hoist = batching.hoist
    return Cutting(
        microbatches=batching.microbatches,
        batch=batching.batch,
        moments=batching.moments,
        rows=batching.rows,
        accumulators=batching.accumulators,
        loops=batching.loops,
        barrier=batching.barrier,
        index=batching.index,
        hoist=str(_bare(hoist.graph)) if hoist is not None else "",
        hoisted=hoist.values if hoist is not None else (),
        hoist_equations=hoist.equations if hoist is not None else (),
    )


def _bare(graph: Graph) -> Graph:
    """The graph without its rules, which do not print in a form that is read back."""
    ops = (replace(op, rule=None, graphs=tuple(map(_bare, op.graphs))) for op in graph.ops)
    return replace(graph, ops=tuple(ops))
