"""Facts through scan, while, cond and remat: the bodies of loops are read to a fixed point.

    carry(0) = facts of the operands
    carry(k) = join(carry(k-1), body(carry(k-1)))      until nothing changes

The lattice is finite and `join` only climbs, so the walk ends.

A loop under vmap goes on while any row does. A microbatch asks its own rows alone, so it may stop
before the whole batch would: trips after a row's last must change nothing of it that is read. With
a mask m of the rows that go on, that is exact where

    1. rows that have ended stay so                 m' = m & g(y)
    2. a trip changes nothing of them               x' = select(m, x, y)
    3. the loop goes on while any row does          any(m), or any(g(x)) with m = g(x) at the start,
                                                    as then m' set means x' = y and g(x') set
    4. and while a count of trips allows it         which is the same in every microbatch
    5. no other carry is read after the loop        such as that count

The front end writes vmap's own loops with any(m); equinox has its test again, and a count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Protocol

from autopar.ir.control_flow import ControlFlow, Port, PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal
from autopar.passes.batch.lattice import REPLICATED, Fact, Share, bound, join
from autopar.passes.batch.trace_alignment import ONE_BY_ONE

_COPY = "copy"
_SPREADING = (_COPY, "broadcast_in_dim", "reshape")
_Places = Callable[[Port], Collection[Operand | None]]


@dataclass(frozen=True)
class _Scope:
    """A graph in which values are followed back to what made them."""

    graph: Graph

    @cached_property
    def makers(self) -> Mapping[str, Op]:
        """The op that made each value."""
        return {v.name: op for op in self.graph.ops for v in op.results}

    def maker(self, operand: Operand) -> Op | None:
        """The op that made a value; None for inputs and literals."""
        return None if isinstance(operand, Literal) else self.makers.get(operand)

    def shown(self, operand: Operand) -> Operand:
        """The value that copies of it show."""
        while (by := self.maker(operand)) is not None and by.kind == _COPY:
            operand = by.operands[0]
        return operand

    def terms(self, operand: Operand) -> Iterator[Operand]:
        """The terms of a conjunction."""
        operand = self.shown(operand)
        by = self.maker(operand)
        if by is not None and by.kind == "and":
            for term in by.operands:
                yield from self.terms(term)
        else:
            yield operand


@dataclass(frozen=True)
class RowLoop:
    """A while loop in the graph that it stands in; `same` are inputs of its test that are one for
    all microbatches in any one trip."""

    op: Op
    around: Graph
    same: Collection[str]

    @cached_property
    def _test(self) -> _Scope:
        return _Scope(self.op.graphs[0])

    @cached_property
    def _body(self) -> _Scope:
        return _Scope(self.op.graphs[1])

    @cached_property
    def _carries(self) -> tuple[Port, ...]:
        flow = self.op.control_flow
        assert flow is not None
        return tuple(p for p in flow.operands if p.is_carry)

    def ends_row_by_row(self) -> bool:
        """True if its trips may be as many as the rows of a microbatch ask for."""
        # 3, 4. The terms of the test: one of rows, and counts.
        test = self._test
        terms = list(test.terms(test.graph.outputs[0]))
        anys = [t for t in terms if (by := test.maker(t)) is not None and by.kind == "reduce_or"]
        if len(anys) != 1 or not all(self._is_same(t) for t in terms if t not in anys):
            return False
        asked = test.makers[str(anys[0])].operands[0]
        return any(self._is_mask(carry, asked) for carry in self._carries)

    def _is_same(self, operand: Operand) -> bool:
        """True if a value of the test is one for all microbatches."""
        by = self._test.maker(operand)
        if by is None:
            return isinstance(operand, Literal) or operand in self.same
        return not by.graphs and all(map(self._is_same, by.operands))

    def _is_mask(self, carry: Port, asked: Operand) -> bool:
        """True if the carry is the mask of the rows that go on, which the test asks for."""
        mask = self._held(carry)
        # 1. A row that has ended stays so.
        terms = list(self._body.terms(self._left(carry)))
        if mask not in terms or self._left(carry) == mask:
            return False
        # 2, 5. Nothing else of it changes but what nobody reads.
        changed: dict[Port, Operand] = {}
        for other in self._carries:
            if other is carry:
                continue
            new = self._unless_ended(other, mask)
            if new is not None:
                changed[other] = new
            elif self._is_read(other):
                return False
        # 3. The mask itself, or what it was made of.
        mask_name = next(n for n, port in self._given.items() if port is carry)
        if self._test.shown(asked) == mask_name:
            return True
        rest = [term for term in terms if term != mask]
        start = _Scope(self.around)
        return self._asks(
            asked, rest, self._body, lambda p: {self._left(p), changed.get(p)}
        ) and self._asks(
            asked, list(start.terms(self._start(carry))), start, lambda p: {self._start(p)}
        )

    def _asks(
        self, asked: Operand, made: Sequence[Operand], scope: _Scope, places: _Places
    ) -> bool:
        """True if the terms of what the test asks for are made in another scope."""
        terms = list(self._test.terms(asked))
        return len(terms) == len(made) and all(
            self._alike(one, other, scope, places) for one, other in zip(terms, made, strict=True)
        )

    def _unless_ended(self, carry: Port, mask: Operand) -> Operand | None:
        """A carry's new value in rows that go on; None where rows that ended may change."""
        old, left = self._held(carry), self._body.shown(self._left(carry))
        if left == old:
            return old
        by = self._body.maker(left)
        if by is None or by.kind != "select_n":
            return None
        # The mask is spread over the items of each row.
        which = by.operands[0]
        while (spread := self._body.maker(which)) is not None and spread.kind in _SPREADING:
            which = spread.operands[0]
        if which != mask or self._body.shown(by.operands[1]) != old:
            return None
        return self._body.shown(by.operands[2])

    def _alike(self, asked: Operand, made: Operand, scope: _Scope, places: _Places) -> bool:
        """True if a value of another scope is made as one of the test is.

        Of a carry that the test is given, the other scope has any of its `places`.
        """
        asked, made = self._test.shown(asked), scope.shown(made)
        if isinstance(asked, Literal) or isinstance(made, Literal):
            return asked == made
        port = self._given.get(asked)
        if port is not None:
            shown = {scope.shown(p) for p in places(port) if p is not None}
            return port.is_carry and made in shown
        one, other = self._test.maker(asked), scope.maker(made)
        return (
            one is not None
            and other is not None
            and not one.graphs
            and (one.kind, one.params) == (other.kind, other.params)
            and one.results.index(self._test.graph.values[asked])
            == other.results.index(scope.graph.values[made])
            and len(one.operands) == len(other.operands)
            and all(
                self._alike(a, b, scope, places)
                for a, b in zip(one.operands, other.operands, strict=True)
            )
        )

    # -- a carry's names -------------------------------------------------------------------

    @cached_property
    def _given(self) -> Mapping[str, Port]:
        """The port of each input of the test."""
        flow = self.op.control_flow
        assert flow is not None
        ports = (p for p in flow.inputs[0] if p.kind is not PortKind.TEST)
        return {i.value.name: p for i, p in zip(self._test.graph.inputs, ports, strict=True)}

    def _held(self, carry: Port) -> str:
        at = next(at for body, at in carry.inputs if body == 1)
        return self._body.graph.inputs[at].value.name

    def _left(self, carry: Port) -> Operand:
        return self._body.graph.outputs[carry.outputs[0][1]]

    def _start(self, carry: Port) -> Operand:
        assert carry.operand is not None
        return self.op.operands[carry.operand]

    def _is_read(self, carry: Port) -> bool:
        assert carry.result is not None
        name = self.op.results[carry.result].name
        return name in self.around.outputs or any(name in op.operands for op in self.around.ops)


_IDEMPOTENT = ("max", "min", "and", "or")


class Bodies(Protocol):
    """The bodies of one op, as its reader sees them."""

    @property
    def around(self) -> Graph:
        """The graph that the op stands in."""
        ...

    def run(self, body: int, given: Sequence[Fact], *, trial: bool) -> tuple[Fact, ...]:
        """The facts of a body's outputs; a trial notes no faults."""
        ...

    def fault(self, text: str) -> None:
        """Note what forbids cutting the op."""
        ...

    def opaque(self) -> None:
        """Note that the op's bodies are not understood."""
        ...


def propagate(op: Op, given: Sequence[Fact], bodies: Bodies) -> tuple[Fact, ...]:
    """The facts of the op's results."""
    flow = op.control_flow
    if flow is None:
        bodies.opaque()
        return (REPLICATED,) * len(op.results)
    if flow.is_remat:
        return bodies.run(0, given, trial=False)
    return _cond(op, given, bodies) if flow.chooses else _loop(op, flow, given, bodies)


def _loop(op: Op, flow: ControlFlow, given: Sequence[Fact], bodies: Bodies) -> tuple[Fact, ...]:
    """Read a scan or while: its carries to a fixed point, then each body once more for faults."""
    outside = dict(zip(flow.operands, given, strict=True))
    # A scan over the rows themselves is sequential: E5.
    if any(p.by_row and f.rows is not None and f.rows.dim == 0 for p, f in outside.items()):
        bodies.fault(ONE_BY_ONE)
        return (REPLICATED,) * len(op.results)
    # A slice has one dim less than its stack.
    inside = {p: _shift_dim(f, -1) if p.by_row else f for p, f in outside.items()}
    carries = [p for p in flow.operands if p.is_carry]
    start = [outside[p] for p in carries]
    body = len(op.graphs) - 1  # a while's test stands before it

    def trip(b: int, carry: Sequence[Fact], *, trial: bool) -> tuple[Fact, ...]:
        facts = inside | dict(zip(carries, carry, strict=True))
        return bodies.run(b, [facts[p] for p in flow.inputs[b]], trial=trial)

    # Trials to the fixed point note no faults; then the body is read once more for them.
    carry = _carried_facts(start, partial(trip, body, trial=True))
    outputs = trip(body, carry, trial=False)
    # Every trip must start from the facts that the body was read with.
    for held, left, first in zip(carry, outputs[: len(carry)], start, strict=True):
        _check_parts(held, first, bodies)
        _check_parts(held, left, bodies)
        if held.rows != left.rows and not held.uniform and not left.uniform:
            bodies.fault("carries rows of the batch that change their order from trip to trip")
    stacked = tuple(_shift_dim(f, 1) for f in outputs[len(carry) :])
    if body == 0:
        return (*carry, *stacked)
    # The number of trips must be the same in every microbatch, or trips beyond a row's last no-ops.
    facts = inside | dict(zip(carries, carry, strict=True))
    asked = zip(op.graphs[0].inputs, flow.inputs[0], strict=True)
    same = {i.value.name for i, p in asked if not facts[p].differs}
    by_rows = len(same) < len(op.graphs[0].inputs)
    by_rows = by_rows and RowLoop(op, bodies.around, same).ends_row_by_row()
    (test,) = trip(0, carry, trial=by_rows)
    if test.differs and not by_rows:
        bodies.fault("runs for as many rounds as the rows of the batch say")
    return tuple(bound(f, test.scalars) if test.scalars else f for f in carry)


def _cond(op: Op, given: Sequence[Fact], bodies: Bodies) -> tuple[Fact, ...]:
    # The branch must be the same in every microbatch.
    if given[0].differs:
        bodies.fault("chooses its branch by the rows of the batch")
        return (REPLICATED,) * len(op.results)
    branches = [bodies.run(b, given[1:], trial=False) for b in range(len(op.graphs))]
    found: list[Fact] = []
    for facts in zip(*branches, strict=True):
        joined = reduce(join, facts)
        for fact in facts:
            _check_parts(joined, fact, bodies)
        found.append(bound(joined, given[0].scalars) if given[0].scalars else joined)
    return tuple(found)


_Trip = Callable[[Sequence[Fact]], Sequence[Fact]]


def _carried_facts(start: Sequence[Fact], trip: _Trip) -> tuple[Fact, ...]:
    """The facts of carried values before every trip of a loop.

    A value that would become partial if it started from zero is taken to be partial; the caller
    checks that it does start so.
    """
    # A carry that starts from zero may become partial; try as if all did, and keep what did.
    hopeful = tuple(replace(f, zero=True) if f.share is Share.REPLICATED else f for f in start)
    if hopeful != tuple(start):
        found = _fixed_point(hopeful, trip)
        pairs = zip(start, found, strict=True)
        start = tuple(f if f.share is Share.PARTIAL else own for own, f in pairs)
    return _fixed_point(start, trip)


def _fixed_point(start: Sequence[Fact], trip: _Trip) -> tuple[Fact, ...]:
    carry = tuple(start)
    while True:
        outputs = trip(carry)
        joined = tuple(join(a, b) for a, b in zip(carry, outputs[: len(carry)], strict=True))
        if joined == carry:
            return carry
        carry = joined


def _check_parts(held: Fact, given: Fact, bodies: Bodies) -> None:
    """Note a fault if a value that is held to be partial is neither that nor zero."""
    if held.share is not Share.PARTIAL:
        return
    part = given.share is Share.PARTIAL and given.combiner == held.combiner
    same = given.share is Share.REPLICATED and held.combiner in _IDEMPOTENT
    if not (part or same or given.zero):
        bodies.fault(
            f"makes a value a {held.combiner} over rows of the batch, and elsewhere what is "
            "neither that nor zero"
        )


def _shift_dim(fact: Fact, step: int) -> Fact:
    """A fact of a slice from that of the stack, or the other way round."""
    if fact.rows is None:
        return fact
    return replace(fact, rows=replace(fact.rows, dim=fact.rows.dim + step))
