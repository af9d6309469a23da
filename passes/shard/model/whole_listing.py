"""The listing of a step that lies whole on one device, from before any plan is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.control_flow import ControlFlow
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import Block, Fence, Listing, ListingStep, LocalOp, Loop
from autopar.ir.sharding import replicated
from autopar.ir.values import Literal


def whole_listing(graph: Graph) -> Listing:
    """The listing of one device that holds everything."""
    block = _Lister(graph, ()).block()
    laid = tuple(replicated(len(i.value.shape)) for i in graph.inputs)
    outputs = tuple(replicated(len(graph.value(o).shape)) for o in graph.outputs)
    return Listing(block, laid, outputs)


class _Lister:
    """Writes a graph, or the body at a path in it, as a block."""

    def __init__(self, graph: Graph, path: tuple[int, ...]) -> None:
        self._graph, self._path = graph, path
        self._same: dict[str, Operand] = {}  # results of remat ops, by what their bodies return

    def block(self) -> Block:
        """The whole graph."""
        steps = tuple(self._steps(self._graph, self._path))
        outputs = tuple(self._name(o) for o in self._graph.outputs)
        return Block(tuple(i.value.name for i in self._graph.inputs), steps, outputs)

    def _steps(self, graph: Graph, path: tuple[int, ...]) -> Iterator[ListingStep]:
        for i, op in enumerate(graph.ops):
            here = (*path, i)
            flow = op.control_flow
            if flow is not None and flow.is_remat:
                yield from self._remat(op, flow, here)
                continue
            if op.kind == "optimization_barrier":
                sources = map(self._resolved, op.operands)
                names = (r.name for r in op.results)
                yield from self._fence(list(zip(names, sources, strict=True)))
                continue
            operands = tuple(self._name(o) for o in op.operands)
            results = tuple(r.name for r in op.results)
            laid = tuple(replicated(len(r.shape)) for r in op.results)
            if flow is not None:
                bodies = (_Lister(body, (*here, b)).block() for b, body in enumerate(op.graphs))
                yield Loop(here, operands, results, laid, tuple(bodies), flow.trips)
            else:
                ranks = (len(graph.value(o).shape) for o in op.operands)
                yield LocalOp(here, operands, results, tuple(map(replicated, ranks)), laid)

    def _remat(self, op: Op, flow: ControlFlow, path: tuple[int, ...]) -> Iterator[ListingStep]:
        """The body in line, behind a fence where the op has one."""
        body = op.graphs[0]
        names = [i.value.name for i in body.inputs]
        given = list(zip(names, map(self._resolved, op.operands), strict=True))
        if flow.fences:
            yield from self._fence(given)
        else:
            self._same.update(given)
        yield from self._steps(body, (*path, 0))
        for result, output in zip(op.results, body.outputs, strict=True):
            self._same[result.name] = output

    def _fence(self, given: Sequence[tuple[str, Operand]]) -> Iterator[ListingStep]:
        fenced = [(n, o) for n, o in given if isinstance(o, str)]
        if fenced:
            yield Fence(tuple(o for _, o in fenced), tuple(n for n, _ in fenced))
        self._same.update((n, o) for n, o in given if not isinstance(o, str))

    def _resolved(self, operand: Operand) -> Operand:
        while isinstance(operand, str) and operand in self._same:
            operand = self._same[operand]
        return operand

    def _name(self, operand: Operand) -> str | None:
        found = self._resolved(operand)
        return None if isinstance(found, Literal) else found
