"""Calls of Python whose results nobody reads, taken out of a step: they are made when it has run.

A part of a step runs once for each microbatch, on a few rows, and parts run in an order of their
own. So what a call reads becomes an output of the step, which is the whole batch's, and a program
of the calls alone makes them, as often and in the order that the step says:

1. a call reads its operands; a slice that takes single rows of the batch is cut off its operand
   later too, so that calls under `vmap` are no matter of the batch's size;
2. of a scan with calls in it the operands are stacked over the trips, and a scan of the calls
   goes over the stacks;
3. of a cond each branch gives the operands of its calls, the others zeros; a cond of the calls
   takes the same branch.

What stays is a call whose results are read, and one in a `while`, whose trips nobody knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import BatchError, bulleted
from autopar.frontend.rewrite.reach import reached_from
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.trace.inline import live
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.host_calls import HOST_CALLS, is_ordered_call

_CUTS = ("slice", "squeeze")


@dataclass(frozen=True)
class LaterCalls:
    """A step without the calls that are made later, and these.

    The inputs of `calls` are the last outputs of the step; None where there are no such calls.
    """

    step: TracedStep
    calls: FlatProgram | None


def split_later_calls(traced: TracedStep, rows: int = 0, batch: Collection[int] = ()) -> LaterCalls:
    """The step, of so many `rows` of the batch, and its calls that are made later.

    The calls cut off single rows of what is made of the `batch`, inputs of the step by number.

    Raises BatchError where ordered calls would then lose their order.
    """
    program = traced.program
    if not any(e.has_effects for e in program.equations):
        return LaterCalls(traced, None)
    reached = reached_from(program, (program.inputs[i] for i in batch))
    # 1. Calls, with the slices of rows that they read, leave each scope from the inside out.
    taken = _Taker(program.fresh(), rows, reached).scope(program)
    _check_order(traced.name, taken.order)
    if not taken.calls:
        return LaterCalls(traced, None)
    # 2. The values that they read become outputs of the step, and inputs of a program of calls.
    given = taken.reads()
    outputs = (*program.outputs, *given)
    rest = replace(program, equations=live(taken.equations, outputs), outputs=outputs)
    calls = FlatProgram(given, tuple(taken.avals[r] for r in given), tuple(taken.calls), ())
    paths = (*traced.output_paths, *(f"calls/{i}" for i in range(len(given))))
    return LaterCalls(replace(traced, program=rest, output_paths=paths), calls)


@dataclass
class _Taken:
    """A scope after its calls were taken out; `order` tells of the ordered ones."""

    equations: list[Equation]
    avals: dict[Ref, Any]
    calls: list[Equation] = field(default_factory=list[Equation])
    order: list[_Ordered] = field(default_factory=list["_Ordered"])

    def reads(self) -> tuple[Ref, ...]:
        """The values of the scope that the calls read."""
        made = {r for e in self.calls for r in e.results}
        wanted = (r for e in self.calls for r in refs(e.operands))
        return tuple(dict.fromkeys(r for r in wanted if r not in made))


@dataclass(frozen=True)
class _Ordered:
    """Ordered calls at one place of the step: whether they stay, or are made later, or both."""

    line: str
    stay: bool
    leave: bool


class _Taker:
    """Numbers what it adds from `fresh`."""

    def __init__(self, fresh: Iterator[Ref], rows: int, reached: frozenset[Ref]) -> None:
        self._fresh, self._rows, self._reached = fresh, rows, reached

    def scope(self, program: FlatProgram) -> _Taken:
        """A step or a body without its calls."""
        read = {r for e in program.equations for r in refs(e.operands)} | set(refs(program.outputs))
        taken = _Taken([], dict(program.avals()))
        for equation in program.equations:
            kind = equation.primitive.name
            # A call whose result is read must stay.
            if kind in HOST_CALLS and equation.has_effects and read.isdisjoint(equation.results):
                taken.calls.append(equation)
                if is_ordered_call(equation.params):
                    taken.order.append(_Ordered(equation.line, stay=False, leave=True))
            elif kind == "scan" and equation.has_effects:
                self._scan(equation, taken)
            elif kind == "cond" and equation.has_effects:
                self._cond(equation, taken)
            else:
                self._stay(equation, taken)
        taken.calls[:0] = self._cuts(taken)
        return taken

    def _stay(self, equation: Equation, taken: _Taken) -> None:
        taken.equations.append(equation)
        inside = (e for body in equation.bodies for e in body.walk())
        lines = [
            e.line
            for e in (equation, *inside)
            if e.primitive.name in HOST_CALLS and is_ordered_call(e.params)
        ]
        if lines:
            taken.order.append(_Ordered(lines[0], stay=True, leave=False))

    def _cuts(self, taken: _Taken) -> list[Equation]:
        """The slices along the batch's rows that make what calls read, in their order."""
        makers = {r: e for e in taken.equations if e.primitive.name in _CUTS for r in e.results}
        found = set[Ref]()
        for read in taken.reads():
            # The slices, one of the other, that end in the value; the last one first.
            chain: list[Equation] = []
            left: Ref | None = read
            while left is not None and left in makers:
                chain.append(makers[left])
                left = next(refs(makers[left].operands), None)
            rows = [i for i, e in enumerate(chain) if self._takes_rows(e)]
            found.update(r for e in chain[: rows[-1] + 1 if rows else 0] for r in e.results)
        return [e for e in taken.equations if not found.isdisjoint(e.results)]

    def _takes_rows(self, equation: Equation) -> bool:
        made = equation.result_avals[0].shape
        of_batch = equation.primitive.name == "slice" and equation.results[0] in self._reached
        return of_batch and any(
            whole == self._rows != cut
            for whole, cut in zip(equation.operand_shapes[0], made, strict=True)
        )

    # -- loops -----------------------------------------------------------------------------

    def _scan(self, scan: Equation, taken: _Taken) -> None:
        # scan(body + calls)  ->  scan(body), which stacks what they read;
        #                         scan(calls) over the stacks
        body, params = scan.bodies[0], scan.params
        inner = self.scope(body)
        self._note_order(inner.order, taken, always=False)
        if not inner.calls:
            taken.equations.append(replace(scan, bodies=(self._rest(body, inner, ()),)))
            return
        consts, first = params["num_consts"], params["num_consts"] + params["num_carry"]
        inputs = {r: i for i, r in enumerate(body.inputs)}
        fixed, sliced, stacked = list[Ref](), list[Ref](), dict[Ref, Ref]()
        for read in inner.reads():
            # Constants and slices of the scan are given to the later scan as they are; carries and
            # values of the body are stacked by this one, a row a trip.
            place = inputs.get(read, -1)
            if 0 <= place < consts:
                fixed.append(read)
            else:
                sliced.append(read)
                if place < first:
                    stacked[read] = next(self._fresh)
        rows = ((params["length"], inner.avals[r]) for r in stacked)
        avals = tuple(jax.ShapeDtypeStruct((n, *a.shape), a.dtype) for n, a in rows)
        taken.avals.update(zip(stacked.values(), avals, strict=True))
        taken.equations.append(
            replace(
                scan,
                results=(*scan.results, *stacked.values()),
                result_avals=(*scan.result_avals, *avals),
                bodies=(self._rest(body, inner, tuple(stacked)),),
                has_effects=any(e.has_effects for e in inner.equations),
            )
        )
        given = (*fixed, *sliced)
        operands = tuple(stacked[r] if r in stacked else scan.operands[inputs[r]] for r in given)
        again = {"num_consts": len(fixed), "num_carry": 0, "length": params["length"]}
        calls = FlatProgram(given, tuple(inner.avals[r] for r in given), tuple(inner.calls), ())
        params = {**again, "reverse": params["reverse"]}
        taken.calls.append(_caller(scan, params, operands, (calls,)))

    def _cond(self, cond: Equation, taken: _Taken) -> None:
        # cond(p, [f + calls, g])  ->  cond(p, [f, g]), g with zeros for what the calls read;
        #                              cond(p, [calls, nothing])
        inner = [self.scope(body) for body in cond.bodies]
        made = [
            [r for r in one.reads() if r not in body.inputs]
            for one, body in zip(inner, cond.bodies, strict=True)
        ]
        avals = [one.avals[r] for one, own in zip(inner, made, strict=True) for r in own]
        # No zero stands for a random key.
        keys = any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
        if keys or not any(one.calls for one in inner):
            self._stay(cond, taken)
            return
        self._note_order([o for one in inner for o in one.order], taken, always=True)
        place = Place.beside(cond, self._fresh)
        results = [[next(self._fresh) for _ in own] for own in made]
        added = [r for own in results for r in own]
        taken.avals.update(zip(added, avals, strict=True))
        bodies: list[FlatProgram] = []
        for b, (one, body) in enumerate(zip(inner, cond.bodies, strict=True)):
            # A branch that is not taken gives zeros for what the calls of the others read.
            outputs = list[Ref | Const]()
            for other, own in enumerate(made):
                if other == b:
                    outputs += own
                    continue
                for r in own:
                    outputs.append(self._zero(inner[other].avals[r], one, place))
            bodies.append(self._rest(body, one, tuple(outputs)))
        taken.equations.append(
            replace(
                cond,
                results=(*cond.results, *added),
                result_avals=(*cond.result_avals, *avals),
                bodies=tuple(bodies),
                has_effects=any(e.has_effects for one in inner for e in one.equations),
            )
        )
        taken.calls.append(self._conditional(cond, inner, made, results))

    def _conditional(
        self,
        cond: Equation,
        inner: Sequence[_Taken],
        made: Sequence[Sequence[Ref]],
        results: Sequence[Sequence[Ref]],
    ) -> Equation:
        """A cond of the calls alone, whose branches are each given what all of them read."""
        operands: list[Ref | Const] = [cond.operands[0]]
        heads: list[tuple[int, Ref]] = []  # branch and value of it, one for each operand
        for b, (one, body) in enumerate(zip(inner, cond.bodies, strict=True)):
            named = dict(zip(body.inputs, cond.operands[1:], strict=True))
            named.update(zip(made[b], results[b], strict=True))
            for read in one.reads():
                operands.append(named[read])
                heads.append((b, read))
        avals = tuple(inner[b].avals[read] for b, read in heads)
        branches = tuple(
            FlatProgram(
                tuple(read if own == b else next(self._fresh) for own, read in heads),
                avals,
                tuple(one.calls),
                (),
            )
            for b, one in enumerate(inner)
        )
        return _caller(cond, {}, tuple(operands), branches)

    def _zero(self, aval: Any, taken: _Taken, place: Place) -> Ref | Const:
        """The value that stands for the operand of a call in a branch that is not taken."""
        if not aval.shape:
            return Const(np.zeros((), aval.dtype)[()], aval)
        made = next(self._fresh)
        zeros = splice(lambda: jnp.zeros(aval.shape, aval.dtype), (), (), (made,), place)
        taken.equations.extend(zeros)
        return made

    def _rest(self, body: FlatProgram, taken: _Taken, more: tuple[Ref | Const, ...]) -> FlatProgram:
        outputs = (*body.outputs, *more)
        return replace(body, equations=live(taken.equations, outputs), outputs=outputs)

    def _note_order(self, inner: Sequence[_Ordered], taken: _Taken, *, always: bool) -> None:
        """A body's ordered calls as one place; in a branch, where they run in one trip, as all."""
        if inner and always:
            taken.order.extend(inner)
        elif inner:
            stay, leave = any(o.stay for o in inner), any(o.leave for o in inner)
            both = stay and len([o for o in inner if o.stay]) > 1
            taken.order.append(_Ordered(inner[0].line, stay=stay, leave=leave or both))


def _caller(
    loop: Equation,
    params: dict[str, Any],
    operands: tuple[Ref | Const, ...],
    bodies: tuple[FlatProgram, ...],
) -> Equation:
    """A loop with nothing but calls in it, in the place of one that had more."""
    return replace(
        loop, params=params, operands=operands, operand_shapes=(), results=(), result_avals=(),
        bodies=bodies,
    )  # fmt: skip


def _check_order(name: str, order: Sequence[_Ordered]) -> None:
    """Raise BatchError unless calls that stay come first, and at one place."""
    # Calls that leave run after all that stay.
    late = [o for i, o in enumerate(order) if o.stay and (i or o.leave)]
    if not late:
        return
    raise BatchError(
        bulleted(
            f"{name} cannot be cut into microbatches or stages: ordered calls would lose their "
            "order.",
            [
                f"an ordered call at {o.line or '?'} gives a result that is used, or is in a "
                "while loop, and is not the first"
                for o in late
            ],
            "Leave ordered=True out, or take one program: stages=1 and microbatches=1.",
        )
    )
