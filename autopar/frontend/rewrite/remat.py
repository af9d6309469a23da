"""Recomputation of chosen forward values for the backward pass, written into a sealed step.

    forward    h = tanh(a)  ...  y = h @ w             h is dropped here
    backward   a' = fence(a, dy)                       dy exists in the backward pass alone
               h' = tanh(a')
               dw = h'.T @ dy

Straight code: the equations that made the values are repeated right before the first backward
equation that reads them. What they start from passes through a fence: a remat equation with
nothing in it, tied to a value that only the backward pass makes. So XLA can neither merge the
repetition with the first copy nor start it early.

A scan whose stacked results a backward scan takes slice by slice: the chosen ones are no longer
stacked but computed in the backward scan's body, from the carry that enters each trip (stacked
in their place where nobody kept it), the slices and the constants. A carry of which all is made
again passes through a fence with a carry of the backward scan: XLA may run the first backward trip
outside the loop, for collectives of later trips to run beside it, and would be free to make its
values again before the loss, whose logits it then holds beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from autopar.frontend.rewrite.splice import (
    AGAIN,
    Makers,
    Place,
    makers_of,
    repeat,
    splice,
    steps_to,
)
from autopar.frontend.trace.graph import build, step_regions
from autopar.frontend.trace.inline import live
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs, rename
from autopar.ir.control_flow import Ran, merely_cast, with_casts
from autopar.ir.values import Role

_FENCE = jex.Primitive("remat2")


def rematerialize(traced: TracedStep, names: Collection[str]) -> TracedStep:
    """The step with the named forward values ("%12") made again where the backward pass reads them.

    The key stays that of the step as it was traced. Values that the forward pass does not make,
    and those made with side effects, stay as they are.
    """
    if not names:
        return traced
    chosen = frozenset(int(name.removeprefix("%")) for name in names)
    # What is added is numbered on, so that the same choice always gives the same program.
    program, regions, fresh = traced.program, step_regions(traced), traced.program.fresh()
    triggers = _triggers(program, regions)
    # 1. Values in the bodies of forward scans, for backward scans.
    program = replace(program, equations=_join_scans(program, regions, chosen, triggers, fresh))
    # 2. Values of the step itself; 3. what nothing reads any more is dropped.
    inputs = zip(program.inputs, traced.graph.inputs, strict=True)
    weights = [r for r, given in inputs if given.role is not Role.BATCH]
    equations = list(_Scope(program, regions, chosen, weights, triggers, fresh).rewritten())
    program = replace(program, equations=live(equations, program.outputs))
    again = replace(traced, program=program)
    return replace(again, graph=build(again))


def value_names(traced: TracedStep) -> frozenset[str]:
    """The names of all values that a step's equations make, bodies included."""
    return frozenset(f"%{r}" for e in traced.program.walk() for r in e.results)


class _Scope:
    """A straight line of equations in which forward values are made again on demand."""

    def __init__(
        self,
        program: FlatProgram,
        regions: Sequence[str],
        chosen: frozenset[Ref],
        weights: Collection[Ref],
        triggers: frozenset[Ref],
        fresh: Iterator[Ref],
    ) -> None:
        self._fresh, self._regions, self._equations = fresh, regions, program.equations
        self._avals: dict[Ref, Any] = dict(program.avals())
        able = [r == "forward" for r in regions]
        self._makers: Makers = makers_of(itertools.compress(program.equations, able), chosen)
        self._inputs = frozenset(program.inputs)
        ran = [_ran(e) for e in itertools.compress(program.equations, able)]
        kept = [r for r in ran if chosen.isdisjoint(r[2])]
        again = [r for r in ran if not chosen.isdisjoint(r[2])]
        self._weights = merely_cast(again, with_casts(kept, weights))  # may be there early
        self._triggers = triggers
        self._again: dict[Ref, Ref] = {}  # forward value -> the same made again
        self._fenced: dict[Ref, Ref] = {}  # forward value -> the same behind a fence
        self._latest: Ref | None = None

    def rewritten(self) -> Iterator[Equation]:
        """The equations in order, repetitions before the first backward equation to need them."""
        for equation, region in zip(self._equations, self._regions, strict=True):
            if region != "backward":
                yield equation
                continue
            # Everything from the nearest kept values on, which has not been made again yet.
            steps = steps_to(refs(equation.operands), self._makers, self._again)
            if steps:
                # A value that shows that the backward pass has come this far.
                trigger = self._first_trigger(refs(equation.operands))
                yield from self._repeated(steps, trigger)
            yield replace(equation, operands=rename(equation.operands, self._again))
            self._latest = self._first_trigger(equation.results)

    def _first_trigger(self, values: Iterable[Ref]) -> Ref | None:
        return next((r for r in values if r in self._triggers), self._latest)

    def _repeated(self, steps: Sequence[Equation], trigger: Ref | None) -> Iterator[Equation]:
        made = {r for step in steps for r in step.results} | self._again.keys()
        starts = dict.fromkeys(r for step in steps for r in self._starts(step, made))
        # Fences tie the kept values to the backward pass, so that XLA neither merges the copies
        # with the first ones nor runs them early. Weights that are cast may be early: what gathers
        # them runs beside other work then, as it does where nothing is made again.
        sources = [r for r in starts if r not in self._fenced]
        weights = [r for r in sources if r in self._weights]
        values = [r for r in sources if r not in self._weights]
        if weights:
            yield self._fence(weights, None, steps[0].line)
        if values:
            yield self._fence(values, trigger, steps[0].line)
        for step in steps:
            operands = rename(rename(step.operands, self._fenced), self._again)
            copy = repeat(step, operands, self._fresh)
            self._again.update(zip(step.results, copy.results, strict=True))
            yield copy

    def _starts(self, step: Equation, made: Collection[Ref]) -> list[Ref]:
        """The operands of repeated equations that XLA must not know to be those of the first ones.

        Arguments of the step, its weights mostly, are left alone where anything else differs:
        a fenced one may have to be copied.
        """
        kept = [r for r in refs(step.operands) if r not in made]
        values = [r for r in kept if r not in self._inputs]
        return values if values or len(kept) < len(list(refs(step.operands))) else kept

    def _fence(self, sources: Sequence[Ref], trigger: Ref | None, line: str) -> Equation:
        operands = (*sources, *(() if trigger is None else (trigger,)))
        fence = _fence({r: self._avals[r] for r in operands}, self._fresh, line)
        self._fenced.update(zip(sources, fence.results, strict=False))
        return fence


def _triggers(program: FlatProgram, regions: Sequence[str]) -> frozenset[Ref]:
    """The values that show, in a fence, that the backward pass has come as far as them.

    XLA folds what is made of literals alone: that is there from the start.
    """
    varies, found = set(program.inputs), set[Ref]()
    for equation, region in zip(program.equations, regions, strict=True):
        if varies.isdisjoint(refs(equation.operands)):
            continue
        varies.update(equation.results)
        if region == "backward":
            made = zip(equation.results, equation.result_avals, strict=True)
            found.update(
                r for r, a in made if jnp.issubdtype(a.dtype, jnp.floating) and all(a.shape)
            )
    return frozenset(found)


def _ran(equation: Equation) -> Ran[Ref]:
    return equation.primitive.name, tuple(refs(equation.operands)), equation.results


def _fence(values: Mapping[Ref, Any], fresh: Iterator[Ref], line: str) -> Equation:
    """A fence around values, by what they are: none of its results is there before all of them."""
    avals = tuple(values.values())
    inner = tuple(next(fresh) for _ in avals)
    return Equation(
        primitive=_FENCE,
        params={"prevent_cse": True},
        operands=tuple(values),
        operand_shapes=tuple(tuple(a.shape) for a in avals),
        results=tuple(next(fresh) for _ in avals),
        result_avals=avals,
        bodies=(FlatProgram(inner, avals, (), inner),),
        name_stack=AGAIN,
        line=line,
    )


# -- recomputation inside backward scans: slices that the forward scan stacked are made anew --


def _join_scans(
    program: FlatProgram,
    regions: Sequence[str],
    chosen: frozenset[Ref],
    triggers: frozenset[Ref],
    fresh: Iterator[Ref],
) -> tuple[Equation, ...]:
    """The program's equations, with chosen values of forward scans made in backward ones.

    A backward scan is joined with each forward scan of as many trips that stacked its slices.
    """
    equations = list(program.equations)
    stacks = {
        # Stacked result -> the forward scan that makes it.
        r: i
        for i, (e, region) in enumerate(zip(equations, regions, strict=True))
        if e.primitive.name == "scan" and region == "forward"
        for r in e.results[e.params["num_carry"] :]
    }
    joined: set[int] = set()
    for i, region in enumerate(regions):
        if equations[i].primitive.name != "scan" or region != "backward":
            continue
        scanned = refs(equations[i].operands[_first_slice(equations[i]) :])
        for source in sorted({stacks[r] for r in scanned if r in stacks}):
            # Trip k of the one reads what trip k of the other stacked.
            if equations[source].params["length"] == equations[i].params["length"]:
                pair = _Pair(equations[source], equations[i], chosen, triggers, fresh)
                equations[source], equations[i] = pair.joined()
                joined.add(source)
    read = {r for e in equations for r in refs(e.operands)} | set(refs(program.outputs))
    return tuple(_prune(e, read) if i in joined else e for i, e in enumerate(equations))


def _first_slice(scan: Equation) -> int:
    return int(scan.params["num_consts"] + scan.params["num_carry"])


def _prune(scan: Equation, read: set[Ref]) -> Equation:
    """A scan without the stacked results that nobody reads."""
    carries = scan.params["num_carry"]
    body = scan.bodies[0]
    kept = [i for i, r in enumerate(scan.results) if i < carries or r in read]
    outputs = tuple(body.outputs[i] for i in kept)
    return replace(
        scan,
        results=tuple(scan.results[i] for i in kept),
        result_avals=tuple(scan.result_avals[i] for i in kept),
        bodies=(replace(body, equations=live(body.equations, outputs), outputs=outputs),),
    )


def _weights(scan: Equation) -> frozenset[Ref]:
    """Values that a scan's body is given beside its carry, and their casts: they may be early."""
    body, consts = scan.bodies[0], scan.params["num_consts"]
    given = (*body.inputs[:consts], *body.inputs[_first_slice(scan) :])
    return with_casts(map(_ran, body.equations), given)


class _Pair:
    """A forward scan and a backward scan over what it stacked."""

    def __init__(
        self,
        forward: Equation,
        backward: Equation,
        chosen: frozenset[Ref],
        triggers: frozenset[Ref],
        fresh: Iterator[Ref],
    ) -> None:
        self._forward, self._backward, self._fresh = forward, backward, fresh
        self._makers = makers_of(forward.bodies[0].equations, chosen)
        body, start = backward.bodies[0], _first_slice(backward)
        self._slices = dict(zip(body.inputs[start:], backward.operands[start:], strict=True))
        # Slices of the backward body -> the values of the forward body that they are.
        outputs = dict(zip(forward.results, forward.bodies[0].outputs, strict=True))
        self._dropped: dict[Ref, Ref] = {}
        for inner, operand in self._slices.items():
            made = outputs.get(operand) if isinstance(operand, int) else None
            if isinstance(made, int) and made in self._makers:
                self._dropped[inner] = made
        self._inner = dict(forward.bodies[0].avals())
        self._given: dict[Ref, Ref | Const] = {}  # value of the forward body -> the same here
        self._consts: list[tuple[Ref, Any, Ref | Const]] = []  # inner, aval, operand
        self._added: list[tuple[Ref, Any, Ref | Const]] = []
        self._stacked: list[tuple[Ref, Ref]] = []  # (new result, value of the forward body)
        # A carry that shows that the backward pass has come this far.
        consts = backward.params["num_consts"]
        carried = zip(body.inputs[consts:start], backward.operands[consts:start], strict=True)
        self._trigger = next((r for r, given in carried if given in triggers), None)
        self._starts: dict[Ref, Ref] = {}  # slice of what was stacked -> value of the forward body

    def joined(self) -> tuple[Equation, Equation]:
        """Both scans rewritten, the forward one with what nobody reads any more."""
        if not self._dropped:
            return self._forward, self._backward
        again: dict[Ref, Ref] = {}
        body = self._backward.bodies[0]
        equations: list[Equation] = []
        for equation in body.equations:
            # In the backward body: a dropped slice is made again before its first reader.
            equations += self._repeated(refs(equation.operands), again)
            equations.append(replace(equation, operands=self._read(equation.operands, again)))
        equations += self._repeated(refs(body.outputs), again)
        outputs = self._read(body.outputs, again)
        equations = self._behind_fence(equations, frozenset(again.values()))
        return self._stacking(), self._slicing(tuple(equations), outputs)

    def _behind_fence(self, equations: list[Equation], made: frozenset[Ref]) -> list[Equation]:
        """The equations; where all that is made again starts from the carry, behind a fence.

        A slice behind a fence is copied, where kernels may else read it in its stack: of large
        values that takes longer than it saves.
        """
        start = self._forward.params["num_consts"]
        carried = self._forward.bodies[0].inputs[start : _first_slice(self._forward)]
        weights = _weights(self._forward)
        starts = {r: v for r, v in self._starts.items() if v not in weights}
        if self._trigger is None or not starts or not set(carried).issuperset(starts.values()):
            return equations
        body = self._backward.bodies[0]
        avals = dict(zip(body.inputs, body.input_avals, strict=True))
        avals.update((inner, aval) for inner, aval, _ in self._added)
        fence = _fence({r: avals[r] for r in (*starts, self._trigger)}, self._fresh, "")
        behind = dict(zip(starts, fence.results, strict=False))
        return [fence] + [
            replace(e, operands=rename(e.operands, behind)) if made.issuperset(e.results) else e
            for e in equations
        ]

    def _repeated(self, wanted: Iterator[Ref], again: dict[Ref, Ref]) -> list[Equation]:
        made = [self._dropped[r] for r in wanted if r in self._dropped]
        copies: list[Equation] = []
        for step in steps_to(made, self._makers, again):
            operands = tuple(self._operand(o, again) for o in step.operands)
            copies.append(repeat(step, operands, self._fresh))
            again.update(zip(step.results, copies[-1].results, strict=True))
        return copies

    def _read(
        self, operands: Sequence[Ref | Const], again: dict[Ref, Ref]
    ) -> tuple[Ref | Const, ...]:
        return rename(operands, {s: again[v] for s, v in self._dropped.items() if v in again})

    # -- what the repeated equations start from --------------------------------------------

    def _operand(self, asked: Ref | Const, again: dict[Ref, Ref]) -> Ref | Const:
        """The operands of a repeated equation: made again, or brought as a constant or a slice."""
        if not isinstance(asked, int):
            return asked
        if asked in again:
            return again[asked]
        # Not made again: a constant of the forward scan, or a slice that it stacks instead.
        if asked not in self._given:
            self._given[asked] = self._brought(asked)
        return self._given[asked]

    def _brought(self, value: Ref) -> Ref | Const:
        inputs, consts = self._forward.bodies[0].inputs, self._forward.params["num_consts"]
        if value in inputs[:consts]:
            operand = self._forward.operands[inputs.index(value)]
            return self._entry(self._consts, operand, value)
        if value in inputs[_first_slice(self._forward) :]:
            return self._slice(self._forward.operands[inputs.index(value)], value)
        outputs = self._forward.bodies[0].outputs[self._forward.params["num_carry"] :]
        if value in outputs:
            stacked = self._forward.results[self._forward.params["num_carry"] :]
            inner = self._slice(stacked[outputs.index(value)], value)
        else:
            self._stacked.append((next(self._fresh), value))
            inner = self._slice(self._stacked[-1][0], value)
        self._starts[inner] = value
        return inner

    def _slice(self, operand: Ref | Const, value: Ref) -> Ref:
        for inner, held in self._slices.items():
            if held is operand or (isinstance(held, int) and held == operand):
                return inner
        return self._entry(self._added, operand, value)

    def _entry(
        self, rows: list[tuple[Ref, Any, Ref | Const]], operand: Ref | Const, value: Ref
    ) -> Ref:
        rows.append((next(self._fresh), self._inner[value], operand))
        return rows[-1][0]

    # -- the two scans ---------------------------------------------------------------------

    def _stacking(self) -> Equation:
        """The forward scan, which stacks also what the backward one now starts from."""
        scan, body = self._forward, self._forward.bodies[0]
        length = scan.params["length"]
        avals = (self._inner[value] for _, value in self._stacked)
        stacks = (jax.ShapeDtypeStruct((length, *a.shape), a.dtype) for a in avals)
        return replace(
            scan,
            results=(*scan.results, *(result for result, _ in self._stacked)),
            result_avals=(*scan.result_avals, *stacks),
            bodies=(replace(body, outputs=(*body.outputs, *(v for _, v in self._stacked))),),
        )

    def _slicing(
        self, equations: tuple[Equation, ...], outputs: tuple[Ref | Const, ...]
    ) -> Equation:
        """The backward scan, without the slices that it now makes by itself."""
        scan, body = self._backward, self._backward.bodies[0]
        consts, start = scan.params["num_consts"], _first_slice(scan)
        length = scan.params["length"]
        rows = list(zip(body.inputs, body.input_avals, scan.operands, strict=True))
        shapes = dict(zip(body.inputs, scan.operand_shapes, strict=True))
        shapes.update((inner, tuple(aval.shape)) for inner, aval, _ in self._consts)
        shapes.update((inner, (length, *aval.shape)) for inner, aval, _ in self._added)
        slices = [row for row in rows[start:] if row[0] not in self._dropped]
        rows = [*rows[:consts], *self._consts, *rows[consts:start], *slices, *self._added]
        inputs, avals, operands = zip(*rows, strict=True)
        params = {
            **scan.params,
            "num_consts": consts + len(self._consts),
            "linear": (False,) * len(rows),
        }
        return replace(
            scan,
            params=params,
            operands=operands,
            operand_shapes=tuple(shapes[inner] for inner in inputs),
            bodies=(FlatProgram(inputs, avals, equations, outputs),),
        )


# -- the user's own checkpoints, opened so that a backward pass can be cut within one --------------


_REMAT = ("remat2", "checkpoint")


def inline_remats(program: FlatProgram) -> FlatProgram:
    """The program with the bodies of its remat equations in line, those within loops too.

    Where a body recomputes for the backward pass, all that it reads goes through one
    `optimization_barrier` first, as it does where JAX lowers remat: else XLA would merge the
    recomputation with what the forward pass made. Fences with nothing in them become barriers.
    """
    if not any(e.primitive.name in _REMAT for e in program.walk()):
        return program
    return _Opener(program.fresh()).program(program)


class _Opener:
    """Numbers what it adds from `fresh`."""

    def __init__(self, fresh: Iterator[Ref]) -> None:
        self._fresh = fresh

    def program(self, program: FlatProgram) -> FlatProgram:
        """A program with nothing left to open, whose inputs are the same."""
        names: dict[Ref, Ref | Const] = {}
        equations = tuple(self._equations(program, names))
        return replace(program, equations=equations, outputs=rename(program.outputs, names))

    def _equations(self, program: FlatProgram, names: dict[Ref, Ref | Const]) -> Iterator[Equation]:
        """The equations in order; `names` gathers what results of remat are now called."""
        for equation in program.equations:
            here = replace(equation, operands=rename(equation.operands, names))
            if equation.primitive.name not in _REMAT:
                yield replace(here, bodies=tuple(map(self.program, here.bodies)))
                continue
            body = here.bodies[0]
            pairs = zip(here.operands, body.input_avals, strict=True)
            types = {o: aval for o, aval in pairs if isinstance(o, int)}
            # r = remat(f)(a)  ->  b = barrier(a); r = f(b)      where it recomputes
            behind: dict[Ref, Ref] = {}
            if recomputes(here) and types:
                behind = {r: next(self._fresh) for r in types}
                yield from splice(
                    lambda *values: lax.optimization_barrier(values),
                    tuple(behind), tuple(types.values()), tuple(behind.values()),
                    Place.beside(here, self._fresh),
                )  # fmt: skip
            names.update(zip(body.inputs, rename(here.operands, behind), strict=True))
            yield from self._equations(body, names)
            names.update(zip(here.results, rename(body.outputs, names), strict=True))


def recomputes(remat: Equation) -> bool:
    """True if a remat equation makes forward values again that must not be taken from before."""
    return "transpose(" in remat.name_stack and bool(remat.params.get("prevent_cse", True))
