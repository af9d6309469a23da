"""Reads a step as numbered equations, in which a plan names what it decided."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from autopar.frontend.trace.run_once import Looked, made_before
from autopar.frontend.trace.written_out import BODIES, CALLS, meaning

# ---- reading the step ----


@dataclass(frozen=True, eq=False)
class Written:
    """An array that is written into an equation."""

    value: Any


class Equation(NamedTuple):
    """An equation of the step; operands are values by number, or what is written into it."""

    eqn: Any
    operands: tuple[int | Written, ...]
    results: tuple[int, ...]
    bodies: tuple[Program, ...]
    is_backward: bool


class Program(NamedTuple):
    """A jaxpr in which what calls would run stands in their place."""

    inputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[int | Written, ...]

    def kinds(self) -> Iterator[str]:
        """The primitives in order, those of bodies after what holds them."""
        for equation in self.equations:
            yield equation.eqn.primitive.name
            for body in equation.bodies:
                yield from body.kinds()


_Env = dict[Any, int | Written]


class Flattener:
    """Numbers every value; arrays that the step closes over become its last inputs."""

    def __init__(self, kept: Sequence[str]) -> None:
        self._names_kept = kept
        self._numbers = itertools.count()
        self._held: dict[int, tuple[int, Any]] = {}  # id of an array -> its number, itself
        self._depth = 0

    def whole(self, closed: Any) -> tuple[Program, list[Any]]:
        """The step's program, and the arrays for those of its inputs that are no arguments."""
        inputs = tuple(next(self._numbers) for _ in closed.jaxpr.invars)
        env = _Env(zip(closed.jaxpr.invars, inputs, strict=True))
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            number = next(self._numbers)
            env[var], self._held[id(const)] = number, (number, const)
        own = len(self._held)
        program = self._program(closed.jaxpr, inputs, env)
        read = {o for e in program.equations for o in e.operands} | set(program.outputs)
        held = [h for i, h in enumerate(self._held.values()) if i < own or h[0] in read]
        return program._replace(inputs=(*inputs, *(n for n, _ in held))), [a for _, a in held]

    def _program(
        self, jaxpr: Any, inputs: tuple[int, ...], env: _Env, around: bool = False
    ) -> Program:
        equations = list(self._equations(jaxpr, env, around))
        outputs = tuple(self._read(env, v) for v in jaxpr.outvars)
        same = made_before(list(map(_looked, equations)))
        equations = [
            e._replace(operands=tuple(_renamed(e.operands, same)))
            for e in equations
            if same.keys().isdisjoint(e.results)
        ]
        outputs = tuple(_renamed(outputs, same))
        wanted, kept = set(outputs), list[Equation]()
        for equation in reversed(equations):
            if equation.eqn.effects or wanted.intersection(equation.results):
                wanted.update(equation.operands)
                kept.append(equation)
        return Program(inputs, tuple(reversed(kept)), outputs)

    def _equations(self, jaxpr: Any, env: _Env, around: bool) -> Iterator[Equation]:
        for eqn in jaxpr.eqns:
            is_backward = around or "transpose(" in str(eqn.source_info.name_stack)
            operands = tuple(self._read(env, v) for v in eqn.invars)
            called = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
            called = self._written_out(eqn) if called is None else called
            if called is None:
                results = tuple(next(self._numbers) for _ in eqn.outvars)
                env.update(zip(eqn.outvars, results, strict=True))
                bodies = tuple(self._bodies(eqn, is_backward))
                yield Equation(eqn, operands, results, bodies, is_backward)
                continue
            inner, mine = self._opened(called)
            mine.update(zip(inner.invars, operands, strict=True))
            yield from self._equations(inner, mine, is_backward)
            for var, output in zip(eqn.outvars, inner.outvars, strict=True):
                env[var] = self._read(mine, output)

    def _written_out(self, eqn: Any) -> Any | None:
        """The jaxpr that an equation stands for, where it does for one."""
        fun = None if eqn.primitive.name in self._names_kept else meaning(eqn)
        types = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
        return None if fun is None else jax.make_jaxpr(fun)(*types)

    def _opened(self, called: Any) -> tuple[Any, _Env]:
        """A jaxpr, closed or not, and the arrays that it closes over."""
        jaxpr = getattr(called, "jaxpr", called)
        pairs = zip(jaxpr.constvars, getattr(called, "consts", ()), strict=True)
        return jaxpr, {var: self._constant(const, var.aval) for var, const in pairs}

    def _bodies(self, eqn: Any, around: bool) -> Iterator[Program]:
        self._depth += 1
        for name in BODIES.get(eqn.primitive.name, ()):
            held = eqn.params[name]
            for body in held if isinstance(held, tuple) else (held,):
                jaxpr, env = self._opened(body)
                inputs = tuple(next(self._numbers) for _ in jaxpr.invars)
                env.update(zip(jaxpr.invars, inputs, strict=True))
                yield self._program(jaxpr, inputs, env, around)
        self._depth -= 1

    def _read(self, env: _Env, var: Any) -> int | Written:
        return self._constant(var.val, var.aval) if isinstance(var, core.Literal) else env[var]

    def _constant(self, value: Any, aval: Any) -> int | Written:
        if self._depth or not aval.shape:
            is_array = isinstance(value, jax.Array)
            return Written(value if is_array else np.asarray(value, aval.dtype))
        if id(value) not in self._held:
            self._held[id(value)] = next(self._numbers), value
        return self._held[id(value)][0]


def _renamed(operands: Iterable[int | Written], same: Mapping[int, int]) -> Iterator[int | Written]:
    return (same.get(o, o) if isinstance(o, int) else o for o in operands)


def _looked(equation: Equation) -> Looked:
    eqn = equation.eqn
    name = eqn.primitive.name
    return Looked(
        name,
        eqn.params,
        equation.operands,
        equation.results,
        [var.aval for var in eqn.outvars],
        equation.is_backward,
        bool(equation.bodies or eqn.effects or name == "optimization_barrier"),
    )


def unplaced(tree: Any) -> Any:
    """Arrays as their types: where they lie now would add equations of its own."""

    def type_alone(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        weak = getattr(leaf, "weak_type", False)  # random keys have no such thing
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)

    return jax.tree.map(type_alone, tree)


def named(table: dict[Any, str]) -> Iterator[tuple[str, Any]]:
    """Each result or operand with its route: "4:0" for the "4" or "3-5" of a table."""
    for route, text in table.items():
        for word in text.split():
            where, _, index = word.partition(":")
            head, slash, last = where.rpartition("/")
            start, _, stop = last.partition("-")
            numbers = [start] if start == "out" else range(int(start), int(stop or start) + 1)
            yield from ((f"{head}{slash}{number}:{index or 0}", route) for number in numbers)
