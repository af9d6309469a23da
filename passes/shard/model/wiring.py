"""A graph as arrays: who makes each value, who reads it, and in which place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import Graph

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Wiring:
    """Nodes are the inputs, then the ops, then the outputs; values are what inputs and ops make.

    Arc k says that node `readers[k]` reads value `sources[k]` in place `slots[k]`, counted among
    what is no literal. A donated output also reads, in place 1, the input that it returns to.
    """

    graph: Graph
    names: tuple[str, ...]  # of the values
    makers: Ints  # [values] node
    places: Ints  # [values] which of its maker's results
    sources: Ints  # [arcs] value
    readers: Ints  # [arcs] node
    slots: Ints  # [arcs]

    @property
    def input_count(self) -> int:
        """Nodes below this are inputs."""
        return len(self.graph.inputs)

    @property
    def first_output(self) -> int:
        """Nodes from this on are outputs."""
        return len(self.graph.inputs) + len(self.graph.ops)

    @property
    def node_count(self) -> int:
        """Inputs, ops and outputs."""
        return self.first_output + len(self.graph.outputs)


def wire(graph: Graph) -> Wiring:
    """The arrays of a graph; bodies of its ops are left out."""
    inputs, ops = graph.inputs, graph.ops
    names = [i.value.name for i in inputs]
    names += [r.name for op in ops for r in op.results]
    made = np.array([1] * len(inputs) + [len(op.results) for op in ops], dtype=np.int64)
    number = dict(zip(names, range(len(names)), strict=True))
    outputs = [(i, o) for i, o in enumerate(graph.outputs) if isinstance(o, str)]
    read = [[number[o] for o in op.operands if isinstance(o, str)] for op in ops]
    counts = np.array([len(r) for r in read], dtype=np.int64)
    start = len(inputs) + len(ops)
    returned = [number[inputs[i].value.name] for _, i in graph.donated]
    sources = [v for r in read for v in r] + [number[o] for _, o in outputs] + returned
    givers = [i for i, _ in outputs] + [o for o, _ in graph.donated]
    return Wiring(
        graph,
        tuple(names),
        np.repeat(np.arange(len(made)), made),
        _within(made),
        np.array(sources, dtype=np.int64),
        np.concatenate(
            [
                np.repeat(np.arange(len(inputs), start), counts),
                start + np.array(givers, dtype=np.int64),
            ]
        ),
        np.concatenate(
            [_within(counts), np.array([0] * len(outputs) + [1] * len(returned), dtype=np.int64)]
        ),
    )


def _within(counts: Ints) -> Ints:
    """0, 1, ... within each run of these lengths."""
    ends = np.cumsum(counts)
    within: Ints = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return within
