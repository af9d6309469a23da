"""Which values of a graph are stored while it lies whole on a device, and from when to when.

The rules and the order are those of `autopar.cost.memory`, so that what a solver counts before
there is a listing agrees with what is held once there is one; moves between shardings are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.cost.kernels import Kernel, Sizes, stored_kernels
from autopar.cost.order import depth_first
from autopar.ir.control_flow import ControlFlow
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import replicated
from autopar.ir.spmd import Block, Fence, Instruction, Loop, Run
from autopar.ir.values import Literal

Span = tuple[int, int]


def stored_spans(graph: Graph) -> Mapping[str, Span]:
    """The first and last kernel between which each stored value is held, by name.

    Inputs are held throughout; a value that is not there is fused. Remat bodies are part of the
    step; a loop is one kernel, whose bodies have spans of their own: ask with their graphs.
    """
    block = _Lister(graph).block()
    given = {i.value.name: i.value.nbytes for i in graph.inputs}
    sizes = Sizes(graph, MeshShape((), ()))
    stored = stored_kernels(block, sizes, given, _bodiless)
    kernels = depth_first(stored, block.outputs).kernels
    end = max(0, len(kernels) - 1)
    spans: dict[str, Span] = dict.fromkeys(given, (0, end))
    for k, kernel in enumerate(kernels):
        for name in kernel.makes:
            spans[name] = (k, end if name in stored.kept else k)
        for name in kernel.reads:
            first, last = spans[name]
            spans[name] = (first, max(last, k))
    for k, kernel in enumerate(kernels):
        if kernel.in_place:
            _hand_over(spans, k, kernel, stored.nbytes)
    values = graph.nested_values
    return {name: span for name, span in spans.items() if name in values}


def _hand_over(spans: dict[str, Span], k: int, kernel: Kernel, nbytes: Mapping[str, int]) -> None:
    """Operands whose buffers an in-place kernel's results take are gone when it runs."""
    dying = sorted(
        n for n in kernel.reads if n not in kernel.makes and spans[n][0] < k == spans[n][1]
    )
    for made in kernel.makes:
        heir = next((n for n in dying if nbytes.get(n) == nbytes.get(made)), None)
        if heir is not None:
            dying.remove(heir)
            spans[heir] = (spans[heir][0], k - 1)


def _bodiless(loop: Loop, op: Op, nbytes: Mapping[str, int]) -> int:
    del loop, op, nbytes
    return 0


class _Lister:
    """Writes a graph as the listing of one device."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._same: dict[str, Operand] = {}  # results of remat ops, by what their bodies return

    def block(self) -> Block:
        """The whole graph."""
        steps = tuple(self._steps(self._graph, ()))
        outputs = tuple(self._name(o) for o in self._graph.outputs)
        return Block(tuple(i.value.name for i in self._graph.inputs), steps, outputs)

    def _steps(self, graph: Graph, path: tuple[int, ...]) -> Iterator[Instruction]:
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
                yield Loop(here, operands, results, laid, ())
            else:
                ranks = (len(graph.value(o).shape) for o in op.operands)
                yield Run(here, operands, results, tuple(map(replicated, ranks)), laid)

    def _remat(self, op: Op, flow: ControlFlow, path: tuple[int, ...]) -> Iterator[Instruction]:
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

    def _fence(self, given: Sequence[tuple[str, Operand]]) -> Iterator[Instruction]:
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
