"""Moves recomputation into backward scans: slices that the forward scan stacked are made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.frontend.inline import live
from autopar.frontend.repeat import makers_of, renamed, repeated, steps_to
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, refs


def join_scans(
    program: FlatProgram, regions: Sequence[str], chosen: frozenset[Ref], fresh: Iterator[Ref]
) -> tuple[Equation, ...]:
    """The program's equations, with chosen values of forward scans made in backward ones.

    A backward scan is joined with each forward scan of as many trips that stacked its slices.
    """
    equations = list(program.equations)
    stacks = {
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
            if equations[source].params["length"] == equations[i].params["length"]:
                pair = _Pair(equations[source], equations[i], chosen, fresh)
                equations[source], equations[i] = pair.joined()
                joined.add(source)
    read = {r for e in equations for r in refs(e.operands)} | set(refs(program.outputs))
    return tuple(_pruned(e, read) if i in joined else e for i, e in enumerate(equations))


def _first_slice(scan: Equation) -> int:
    return int(scan.params["num_consts"] + scan.params["num_carry"])


def _pruned(scan: Equation, read: set[Ref]) -> Equation:
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


class _Pair:
    """A forward scan and a backward scan over what it stacked."""

    def __init__(
        self, forward: Equation, backward: Equation, chosen: frozenset[Ref], fresh: Iterator[Ref]
    ) -> None:
        self._forward, self._backward, self._fresh = forward, backward, fresh
        self._makers = makers_of(forward.bodies[0].equations, chosen)
        body, start = backward.bodies[0], _first_slice(backward)
        self._slices = dict(zip(body.inputs[start:], backward.operands[start:], strict=True))
        self._dropped = dict(self._unstacked())
        self._inner = dict(_inner_avals(forward.bodies[0]))
        self._given: dict[Ref, Ref | Const] = {}  # value of the forward body -> the same here
        self._consts: list[tuple[Ref, Any, Ref | Const]] = []  # inner, aval, operand
        self._added: list[tuple[Ref, Any, Ref | Const]] = []
        self._stacked: list[tuple[Ref, Ref]] = []  # (new result, value of the forward body)

    def joined(self) -> tuple[Equation, Equation]:
        """Both scans rewritten, the forward one with what nobody reads any more."""
        if not self._dropped:
            return self._forward, self._backward
        again: dict[Ref, Ref] = {}
        body = self._backward.bodies[0]
        equations: list[Equation] = []
        for equation in body.equations:
            equations += self._repeated(refs(equation.operands), again)
            equations.append(replace(equation, operands=self._read(equation.operands, again)))
        equations += self._repeated(refs(body.outputs), again)
        outputs = self._read(body.outputs, again)
        return self._stacking(), self._slicing(tuple(equations), outputs)

    def _unstacked(self) -> Iterator[tuple[Ref, Ref]]:
        """Slices of the backward body and the values of the forward body that they are."""
        outputs = dict(zip(self._forward.results, self._forward.bodies[0].outputs, strict=True))
        for inner, operand in self._slices.items():
            made = outputs.get(operand) if isinstance(operand, int) else None
            if isinstance(made, int) and made in self._makers:
                yield inner, made

    def _repeated(self, wanted: Iterator[Ref], again: dict[Ref, Ref]) -> list[Equation]:
        made = [self._dropped[r] for r in wanted if r in self._dropped]
        copies: list[Equation] = []
        for step in steps_to(made, self._makers, again):
            operands = tuple(self._operand(o, again) for o in step.operands)
            copies.append(repeated(step, operands, self._fresh))
            again.update(zip(step.results, copies[-1].results, strict=True))
        return copies

    def _read(
        self, operands: Sequence[Ref | Const], again: dict[Ref, Ref]
    ) -> tuple[Ref | Const, ...]:
        return renamed(operands, {s: again[v] for s, v in self._dropped.items() if v in again})

    # -- what the repeated equations start from --------------------------------------------

    def _operand(self, asked: Ref | Const, again: dict[Ref, Ref]) -> Ref | Const:
        """What a repeated equation reads: made again, or brought as a constant or a slice."""
        if not isinstance(asked, int):
            return asked
        if asked in again:
            return again[asked]
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
            return self._slice(stacked[outputs.index(value)], value)
        self._stacked.append((next(self._fresh), value))
        return self._slice(self._stacked[-1][0], value)

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


def _inner_avals(program: FlatProgram) -> Iterator[tuple[Ref, Any]]:
    yield from zip(program.inputs, program.input_avals, strict=True)
    for equation in program.equations:
        yield from zip(equation.results, equation.result_avals, strict=True)
