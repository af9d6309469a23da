"""Rewrites a sealed step so that chosen forward values are computed again for the backward pass.

Straight code: the equations that made the values are repeated right before the first backward
equation that reads them. What they start from passes through a fence: a remat equation with
nothing in it, tied to a value that only the backward pass makes. So XLA can neither merge the
repetition with the first copy nor start it early.

A scan whose stacked results a backward scan takes slice by slice: the chosen ones are no longer
stacked but computed in the backward scan's body, from the carry that enters each trip (stacked
in their place where nobody kept it), the slices and the constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from autopar.frontend.build import build, step_regions
from autopar.frontend.inline import live
from autopar.frontend.repeat import AGAIN, Makers, makers_of, renamed, repeated, steps_to
from autopar.frontend.scans import join_scans
from autopar.frontend.traced import Equation, FlatProgram, Ref, TracedStep, refs

_FENCE = jex.Primitive("remat2")


def rematerialize(traced: TracedStep, names: Collection[str]) -> TracedStep:
    """The step with the named forward values ("%12") made again where the backward pass reads them.

    The key stays that of the step as it was traced. Values that the forward pass does not make,
    and those made with side effects, stay as they are.
    """
    if not names:
        return traced
    chosen = frozenset(int(name.removeprefix("%")) for name in names)
    rewriter = _Rewriter(chosen, traced.program.fresh())
    program = rewriter.whole(traced.program, step_regions(traced))
    again = replace(traced, program=program)
    return replace(again, graph=build(again))


def value_names(traced: TracedStep) -> frozenset[str]:
    """The names of all values that a step's equations make, bodies included."""
    return frozenset(f"%{r}" for e in traced.program.walk() for r in e.results)


class _Rewriter:
    """Numbers what it adds from `fresh`, so that the same choice always gives the same program."""

    def __init__(self, chosen: frozenset[Ref], fresh: Iterator[Ref]) -> None:
        self._chosen, self._fresh = chosen, fresh

    def whole(self, program: FlatProgram, regions: Sequence[str]) -> FlatProgram:
        """A program that holds a forward and a backward pass, rewritten."""
        equations = join_scans(program, regions, self._chosen, self._fresh)
        scope = _Scope(replace(program, equations=equations), regions, self._chosen, self._fresh)
        return replace(program, equations=live(list(scope.rewritten()), program.outputs))


class _Scope:
    """One straight line of equations in which forward values are made again on demand."""

    def __init__(
        self,
        program: FlatProgram,
        regions: Sequence[str],
        chosen: frozenset[Ref],
        fresh: Iterator[Ref],
    ) -> None:
        self._fresh, self._regions, self._equations = fresh, regions, program.equations
        self._avals: dict[Ref, Any] = dict(program.avals())
        able = [r == "forward" for r in regions]
        self._makers: Makers = makers_of(itertools.compress(program.equations, able), chosen)
        self._inputs = frozenset(program.inputs)
        self._again: dict[Ref, Ref] = {}  # forward value -> the same made again
        self._fenced: dict[Ref, Ref] = {}  # forward value -> the same behind a fence
        self._varies = set(program.inputs)  # values that no compiler can compute beforehand
        self._backward: set[Ref] = set()
        self._latest: Ref | None = None

    def rewritten(self) -> Iterator[Equation]:
        """Every equation in order, repetitions before the first backward equation to need them."""
        for equation, region in zip(self._equations, self._regions, strict=True):
            if not self._varies.isdisjoint(refs(equation.operands)):
                self._varies.update(equation.results)
            if region != "backward":
                yield equation
                continue
            steps = steps_to(refs(equation.operands), self._makers, self._again)
            if steps:
                yield from self._repeated(steps, self._trigger(equation))
            yield replace(equation, operands=renamed(equation.operands, self._again))
            self._backward.update(equation.results)
            self._latest = next(filter(self._triggers, equation.results), self._latest)

    def _trigger(self, equation: Equation) -> Ref | None:
        """A value that shows that the backward pass has come this far."""
        near = (r for r in refs(equation.operands) if r in self._backward)
        return next(filter(self._triggers, near), self._latest)

    def _triggers(self, ref: Ref) -> bool:
        aval = self._avals[ref]
        able = jnp.issubdtype(aval.dtype, jnp.floating) and all(aval.shape)
        return able and ref in self._varies

    def _repeated(self, steps: Sequence[Equation], trigger: Ref | None) -> Iterator[Equation]:
        made = {r for step in steps for r in step.results} | self._again.keys()
        starts = dict.fromkeys(r for step in steps for r in self._starts(step, made))
        sources = [r for r in starts if r not in self._fenced]
        if sources:
            yield self._fence(sources, trigger, steps[0].line)
        for step in steps:
            operands = renamed(renamed(step.operands, self._fenced), self._again)
            copy = repeated(step, operands, self._fresh)
            self._again.update(zip(step.results, copy.results, strict=True))
            yield copy

    def _starts(self, step: Equation, made: Collection[Ref]) -> list[Ref]:
        """What a repeated equation reads that must not be known to be what the first one read.

        Arguments of the step, its weights mostly, are left alone where anything else differs:
        a fenced one may have to be copied.
        """
        kept = [r for r in refs(step.operands) if r not in made]
        values = [r for r in kept if r not in self._inputs]
        return values if values or len(kept) < len(list(refs(step.operands))) else kept

    def _fence(self, sources: Sequence[Ref], trigger: Ref | None, line: str) -> Equation:
        operands = (*sources, *(() if trigger is None else (trigger,)))
        avals = tuple(self._avals[r] for r in operands)
        inner = tuple(next(self._fresh) for _ in operands)
        results = tuple(next(self._fresh) for _ in operands)
        self._fenced.update(zip(sources, results, strict=False))
        return Equation(
            primitive=_FENCE,
            params={"prevent_cse": True},
            operands=operands,
            operand_shapes=tuple(tuple(a.shape) for a in avals),
            results=results,
            result_avals=avals,
            bodies=(FlatProgram(inner, avals, (), inner),),
            name_stack=AGAIN,
            line=line,
        )
