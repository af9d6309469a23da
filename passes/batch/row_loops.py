"""Loops that rows leave one by one: trips after a row's last change nothing of it that is read.

A loop under vmap goes on while any row does. A microbatch asks its own rows alone, so it may stop
before the whole batch would. With a mask m of the rows that go on, that is exact where

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
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.control_flow import Port, PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal

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
        if self._test.shown(asked) == self._asked(carry):
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

    def _asked(self, carry: Port) -> str:
        return next(n for n, port in self._given.items() if port is carry)

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
