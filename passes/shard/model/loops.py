"""Reads loops into decisions: what crosses a loop's boundary passes through a port.

A carry is one port for its start, the body's input and output, and the result, so all lie alike.
Constants and scanned inputs are ports too: resharding before a port runs once, after it every trip.
A carry that may be a partial sum is read after the loop through a group of its own: what is not
linear there (the squares of a norm) asks for the sum once, and not in every trip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.control_flow import ControlFlow, Port, PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal, Value
from autopar.passes.shard.model.decisions import DecisionKind, OpPath, Place

if TYPE_CHECKING:
    from autopar.passes.shard.model.read import Reader


def read_loop(
    reader: Reader, graph: Graph, op: Op, flow: ControlFlow, path: OpPath, runs: int
) -> None:
    """A scan, while or cond with its bodies."""
    _LoopReader(reader, graph, op, flow, path, runs).read()


class _LoopReader:
    """A loop op that is being read."""

    def __init__(
        self, reader: Reader, graph: Graph, op: Op, flow: ControlFlow, path: OpPath, runs: int
    ) -> None:
        self._reader, self._graph, self._op, self._flow, self._path = reader, graph, op, flow, path
        self._runs, self._inner_runs = runs, runs * flow.trips

    def read(self) -> None:
        """Reads what enters, what only leaves, then the bodies, each with what leaves it."""
        op, flow = self._op, self._flow
        decisions: dict[Port, int] = {}
        for port in flow.ports:
            if port.operand is not None:
                decisions[port] = self._enter(port, op.operands[port.operand])
            elif port.result is not None:
                decisions[port] = self._make(port, op.results[port.result])
            else:
                answer = op.graphs[0].value(op.graphs[0].outputs[0])
                decisions[port] = self._scalar("test", answer)
        for b, body in enumerate(op.graphs):
            self._reader.read_ops(body, (*self._path, b), self._inner_runs)
            for operand, port in zip(body.outputs, flow.outputs[b], strict=True):
                self._exit(body, operand, decisions[port])
        for port, result in zip(flow.results, op.results, strict=True):
            if not port.by_row:
                self._leave(result, decisions[port])

    # -- into the loop ---------------------------------------------------------------------

    def _enter(self, port: Port, operand: Operand) -> int:
        """Makes one decision for an operand and for what each body has of it.

        A carry, or what a branch is given, may hold a partial sum where its start is one, or zero.
        """
        if port.kind is PortKind.CHOICE:
            index = self._scalar("which", self._graph.value(operand))
            self._exit(self._graph, operand, index)
            return index
        first, *others = (self._op.graphs[b].inputs[i].value for b, i in port.inputs)
        index = self._decide(first)
        decision = self._reader.decisions[index]
        decision.carried = port.is_carry
        if port.kind is PortKind.CONSTANT:  # what is the same in every trip is made once
            decision.members[0] = decision.members[0]._replace(runs=self._runs)
        if port.is_carry or self._flow.chooses:
            if first.is_floating and self._may_be_partial(operand):
                self._reader.mark_partial(index, first)
        self._read_operand(operand, index, port)
        for value in others:
            self._reader.place(value, index, tuple(range(len(value.shape))))
            if decision.may_be_partial:
                self._reader.mark_partial(index, value)
        return index

    def _read_operand(self, operand: Operand, decision: int, port: Port) -> None:
        if isinstance(operand, Literal):
            return
        value = self._graph.values[operand]
        dims = tuple(range(len(value.shape)))
        origin = self._op.origin
        self._reader.need_exact(
            operand, value, decision, self._runs, origin.region, origin.line,
            (-1, *dims[:-1]) if port.by_row else dims,
            enters=not port.is_carry,
        )  # fmt: skip

    # -- out of it -------------------------------------------------------------------------

    def _make(self, port: Port, result: Value) -> int:
        """The decision of what branches give, or of a row of what a scan stacks."""
        if port.by_row:
            row = Value(f"{result.name}.slice", result.shape[1:], result.dtype)
            decision = self._decide(row)
            self._reader.place(result, decision, (-1, *range(len(result.shape) - 1)))
        else:
            decision = self._decide(result)
        if result.is_floating:  # gradients of stacked weights may be summed after the loop
            self._reader.mark_partial(decision, result)
        return decision

    def _exit(self, graph: Graph, operand: Operand, decision: int) -> None:
        if not self._may_be_partial(operand):
            self._reader.decisions[decision].may_be_partial = False
        if isinstance(operand, Literal):
            return
        origin = self._op.origin
        self._reader.need_exact(
            operand, graph.values[operand], decision, self._inner_runs, origin.region, origin.line
        )

    def _leave(self, result: Value, decision: int) -> None:
        """A result lies as its port does; ops after the loop read a sum apart from its trips."""
        home = Place(decision, tuple(range(len(result.shape))))
        if self._reader.decisions[decision].may_be_partial:
            self._reader.add_sum(result, home, self._runs, self._op.origin)
        elif self._reader.standings.get(result.name) != home:
            self._reader.place(result, decision, home.dims, runs=self._runs)

    # -- decisions -------------------------------------------------------------------------

    def _decide(self, value: Value) -> int:
        origin = self._op.origin
        label = f"{origin.module}/{self._op.kind}".lstrip("/")
        decision = self._reader.add_group(
            DecisionKind.PORT, value, label, self._inner_runs, origin.region, origin.line
        )
        self._reader.decisions[decision].depth = self._depth()
        return decision

    def _scalar(self, name: str, value: Value) -> int:
        """Reads the value that selects a branch, or that ends a loop."""
        return self._decide(Value(f"{self._op.results[0].name}.{name}", (), value.dtype))

    def _depth(self) -> int:
        places = [self._reader.standing(o) for o in self._op.operands]
        decisions = self._reader.decisions
        return 1 + max(
            (decisions[p.decision].depth for p in places if isinstance(p, Place)), default=0
        )

    def _may_be_partial(self, operand: Operand) -> bool:
        """False for literals but zero: each device has the whole of one, and would add it."""
        if isinstance(operand, Literal):
            return operand.is_zero
        return self._reader.standing(operand) is not None
