"""Facts through scan, while, cond and remat: the bodies of loops are read to a fixed point.

    carry(0) = facts of the operands
    carry(k) = join(carry(k-1), body(carry(k-1)))      until nothing changes

The lattice is finite and `join` only climbs, so the walk ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Protocol

from autopar.ir.control_flow import ControlFlow
from autopar.ir.graph import Graph, Op
from autopar.passes.batch.lattice import REPLICATED, Fact, Share, bound, join
from autopar.passes.batch.row_loops import RowLoop
from autopar.passes.batch.trace_alignment import ONE_BY_ONE

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
