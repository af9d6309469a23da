"""Reads loops into decisions: what crosses a loop's boundary passes through a port.

A carry is one port for its start, the body's input and output, and the result, so all lie alike.
Constants and scanned inputs are ports too: resharding before a port runs once, after it every trip.
A carry that may be a partial sum is read after the loop through a group of its own: what is not
linear there (the squares of a norm) asks for the sum once, and not in every trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal, Value
from autopar.passes.shard.model.decisions import DecisionKind, OpPath, Place

if TYPE_CHECKING:
    from autopar.passes.shard.model.read import Reader


def read_loop(reader: Reader, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
    """A scan, while or cond with its bodies."""
    entry = _LoopReader(reader, graph, op, path, runs)
    if op.kind == "scan":
        entry.scan()
    elif op.kind == "while":
        entry.while_()
    else:
        entry.cond()


def trip_count(op: Op) -> int:
    """How often a loop's body runs: known for scan, taken as once for while and cond."""
    return op.whole("length") if op.kind == "scan" else 1


class _LoopReader:
    """One loop op being read."""

    def __init__(self, reader: Reader, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
        self._reader, self._graph, self._op, self._path = reader, graph, op, path
        self._runs, self._inner_runs = runs, runs * trip_count(op)

    def scan(self) -> None:
        """consts, carries, scanned slices -> carries, stacked slices."""
        op, body = self._op, self._op.graphs[0]
        consts, carries = op.whole("num_consts"), op.whole("num_carry")
        for i, given in enumerate(body.inputs):
            if i < consts:
                self._entry(op.operands[i], given.value)
            elif i < consts + carries:
                self._carry(op.operands[i], given.value, carried=True)
            else:
                self._entry(op.operands[i], given.value, stacked=True)
        outs = [self._result_port(r) for r in op.results[carries:]]
        self._reader.read_ops(body, (*self._path, 0), self._inner_runs)
        ports = [self._port_of(body.inputs[consts + k].value) for k in range(carries)] + outs
        for operand, port in zip(body.outputs, ports, strict=True):
            self._exit(body, operand, port)
        self._leave(ports[:carries])

    def while_(self) -> None:
        """Condition and body share the carries."""
        op, (test, body) = self._op, self._op.graphs
        test_consts, body_consts = op.whole("cond_nconsts"), op.whole("body_nconsts")
        starts = op.operands[test_consts + body_consts :]
        for operand, given in zip(op.operands, test.inputs[:test_consts], strict=False):
            self._entry(operand, given.value)
        for operand, given in zip(
            op.operands[test_consts:], body.inputs[:body_consts], strict=False
        ):
            self._entry(operand, given.value)
        for k, start in enumerate(starts):
            value = body.inputs[body_consts + k].value
            self._carry(start, value, carried=True)
            port = self._port_of(value)
            tested = test.inputs[test_consts + k].value
            self._reader.place(tested, port, tuple(range(len(tested.shape))))
        self._reader.read_ops(test, (*self._path, 0), self._inner_runs)
        self._reader.read_ops(body, (*self._path, 1), self._inner_runs)
        answer = test.value(test.outputs[0])
        self._exit(
            test, test.outputs[0], self._port(Value(f"{op.results[0].name}.test", (), answer.dtype))
        )
        ports = [self._port_of(given.value) for given in body.inputs[body_consts:]]
        for operand, port in zip(body.outputs, ports, strict=True):
            self._exit(body, operand, port)
        self._leave(ports)

    def cond(self) -> None:
        """Every branch takes its operands and gives its results in the same shardings."""
        op = self._op
        which = self._graph.value(op.operands[0])
        selector = self._port(Value(f"{op.results[0].name}.which", (), which.dtype))
        self._exit(self._graph, op.operands[0], selector)
        first = op.graphs[0]
        for i, given in enumerate(first.inputs):
            port = self._carry(op.operands[i + 1], given.value)
            for other in op.graphs[1:]:
                value = other.inputs[i].value
                self._reader.place(value, port, tuple(range(len(value.shape))))
                if self._reader.decisions[port].may_be_partial:
                    self._reader.mark_partial(port, value)
        outs = [self._port(r) for r in op.results]
        for result, port in zip(op.results, outs, strict=True):
            if result.is_floating:
                self._reader.mark_partial(port, result)
        for b, branch in enumerate(op.graphs):
            self._reader.read_ops(branch, (*self._path, b), self._inner_runs)
            for operand, port in zip(branch.outputs, outs, strict=True):
                self._exit(branch, operand, port)
        self._leave(outs)

    # -- ports -----------------------------------------------------------------------------

    def _port(self, value: Value) -> int:
        origin = self._op.origin
        label = f"{origin.module}/{self._op.kind}".lstrip("/")
        port = self._reader.add_group(
            DecisionKind.PORT, value, label, self._inner_runs, origin.region, origin.line
        )
        self._reader.decisions[port].depth = self._depth()
        return port

    def _depth(self) -> int:
        places = [self._reader.standing(o) for o in self._op.operands]
        decisions = self._reader.decisions
        return 1 + max(
            (decisions[p.decision].depth for p in places if isinstance(p, Place)), default=0
        )

    def _port_of(self, value: Value) -> int:
        place = self._reader.standings[value.name]
        assert isinstance(place, Place)
        return place.decision

    def _entry(self, operand: Operand, inner: Value, stacked: bool = False) -> int:
        """A constant or scanned operand: read once, in the port's sharding."""
        port = self._port(inner)
        if not stacked:  # what is the same in every trip is made once
            members = self._reader.decisions[port].members
            members[0] = members[0]._replace(runs=self._runs)
        self._read_outer(operand, port, stacked)
        return port

    def _read_outer(self, operand: Operand, port: int, stacked: bool) -> None:
        if isinstance(operand, Literal):
            return
        value = self._graph.values[operand]
        dims = tuple(range(len(value.shape)))
        shifted = (-1, *dims[:-1]) if stacked else dims
        origin = self._op.origin
        self._reader.need_exact(
            operand, value, port, self._runs, origin.region, origin.line, shifted, enters=True
        )

    def _carry(self, start: Operand, inner: Value, carried: bool = False) -> int:
        """One port; it may hold a partial sum where the start is one, or zero, or is masked."""
        port = self._port(inner)
        self._reader.decisions[port].carried = carried
        if inner.is_floating and self._may_be_partial(start):
            self._reader.mark_partial(port, inner)
        self._read_outer(start, port, stacked=False)
        return port

    def _may_be_partial(self, operand: Operand) -> bool:
        """Every device has the whole of a literal, and would add it but for a zero."""
        if isinstance(operand, Literal):
            return operand.is_zero
        return self._reader.standing(operand) is not None

    def _leave(self, ports: Sequence[int]) -> None:
        """What the ports hand on: results as they lie, and sums as ops after the loop read them."""
        for result, port in zip(self._op.results, ports, strict=False):
            home = Place(port, tuple(range(len(result.shape))))
            if self._reader.decisions[port].may_be_partial:
                self._reader.add_sum(result, home, self._runs, self._op.origin)
            elif self._reader.standings.get(result.name) != home:
                self._reader.place(result, port, home.dims, runs=self._runs)

    def _result_port(self, stacked: Value) -> int:
        """The port of a scan's stacked result: one slice of it."""
        port = self._port(Value(f"{stacked.name}.slice", stacked.shape[1:], stacked.dtype))
        self._reader.place(stacked, port, (-1, *range(len(stacked.shape) - 1)))
        if stacked.is_floating:  # gradients of stacked weights may be summed after the loop
            self._reader.mark_partial(port, stacked)
        return port

    def _exit(self, graph: Graph, operand: Operand, port: int) -> None:
        if not self._may_be_partial(operand):
            self._reader.decisions[port].may_be_partial = False
        if isinstance(operand, Literal):
            return
        origin = self._op.origin
        self._reader.need_exact(
            operand, graph.values[operand], port, self._inner_runs, origin.region, origin.line
        )
