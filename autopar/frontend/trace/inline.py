"""Flattening of a jaxpr: calls are inlined, loops stay equations that hold flattened bodies.

A product that the step writes twice, of the same values, is one equation.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from autopar.frontend.compat import is_kernel, line_of, name_stack_of, params_of, traced_beside
from autopar.frontend.trace.run_once import Looked, made_before
from autopar.frontend.trace.written_out import BODIES, CALLS, is_foreign, meaning
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, refs, rename

_Env = dict[Any, Ref | Const]


def flatten(closed: Any, kept: Collection[str] = ()) -> tuple[FlatProgram, tuple[Any, ...]]:
    """The program of a closed jaxpr, and the closed-over arrays that are its last inputs.

    Arrays that jitted functions within closed over are among them, each once. Equations that
    nothing needs are dropped. Primitives named in `kept` are not written out.
    """
    return _Flattener(kept).whole(closed)


@dataclass(frozen=True)
class _Site:
    """The place at which a jaxpr is called: its name stack and the user's line."""

    stack: str = ""
    line: str = ""

    def at(self, equation: Any) -> _Site:
        """The site of an equation of the jaxpr."""
        stack = "/".join(s for s in (self.stack, name_stack_of(equation)) if s)
        return _Site(stack, line_of(equation, self.line))


class _Flattener:
    """Walks jaxprs, numbering every value once over the whole nest."""

    def __init__(self, kept: Collection[str]) -> None:
        self._names_kept = kept
        self._numbers = itertools.count()
        # Arrays of the outermost program by identity, and the inputs that they are.
        self._homes: dict[int, Ref] = {}
        self._hoisted: list[tuple[Ref, Const]] = []
        self._depth = 0

    def whole(self, closed: Any) -> tuple[FlatProgram, tuple[Any, ...]]:
        """The outermost program, and the values of its last inputs."""
        jaxpr = closed.jaxpr
        # Arrays that the step closes over are its last inputs.
        heads = (*jaxpr.invars, *jaxpr.constvars)
        inputs = tuple(next(self._numbers) for _ in heads)
        env: _Env = dict(zip(heads, inputs, strict=True))
        homes = zip(closed.consts, inputs[len(jaxpr.invars) :], strict=True)
        self._homes.update((id(const), ref) for const, ref in homes)
        program = self._program(jaxpr, heads, inputs, env, _Site())
        read = {o for e in program.equations for o in refs(e.operands)}
        read.update(refs(program.outputs))
        # So are arrays that jitted functions within it closed over, if anything is left that reads
        # them.
        extra = [(ref, const) for ref, const in self._hoisted if ref in read]
        whole = FlatProgram(
            (*program.inputs, *(ref for ref, _ in extra)),
            (*program.input_avals, *(const.aval for _, const in extra)),
            program.equations,
            program.outputs,
        )
        return whole, (*closed.consts, *(const.value for _, const in extra))

    def _program(
        self, jaxpr: Any, heads: Sequence[Any], inputs: tuple[Ref, ...], env: _Env, site: _Site
    ) -> FlatProgram:
        equations = list(self._equations(jaxpr, env, site))
        outputs = tuple(self._read(env, v) for v in jaxpr.outvars)
        if same := made_before(list(map(_looked, equations))):
            equations = [
                replace(e, operands=rename(e.operands, same))
                for e in equations
                if same.keys().isdisjoint(e.results)
            ]
            outputs = rename(outputs, same)
        kept = live(equations, outputs)
        return FlatProgram(inputs, tuple(v.aval for v in heads), kept, outputs)

    def _equations(self, jaxpr: Any, env: _Env, site: _Site) -> Iterator[Equation]:
        for eqn in jaxpr.eqns:
            here = site.at(eqn)
            # Three cases: a call (jit, custom_vjp, ...) is inlined; a primitive that stands for
            # others is written out by them; anything else is kept, with its bodies flattened.
            primitive = eqn.primitive
            inner, is_kept = CALLS.get(primitive.name), primitive.name in self._names_kept
            called = None
            if inner is not None and inner in eqn.params:
                called = eqn.params[inner]
            elif not is_kept and not (is_foreign(primitive) and is_kernel(primitive)):
                fun = meaning(eqn)
                called = None if fun is None else traced_beside(eqn, fun)
            if called is not None:
                yield from self._inline(eqn, called, env, here)
            else:
                yield self._keep(eqn, env, here)

    def _inline(self, eqn: Any, called: Any, env: _Env, site: _Site) -> Iterator[Equation]:
        jaxpr, consts = _open(called)
        # Only names change: the call's inputs are the operands, its outputs the results.
        inner: _Env = {
            v: self._constant(Const(c, v.aval))
            for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        inner.update(zip(jaxpr.invars, (self._read(env, v) for v in eqn.invars), strict=True))
        yield from self._equations(jaxpr, inner, site)
        for outer, v in zip(eqn.outvars, jaxpr.outvars, strict=True):
            env[outer] = self._read(inner, v)

    def _keep(self, eqn: Any, env: _Env, site: _Site) -> Equation:
        # One number for each value, over the whole nest.
        operands = tuple(self._read(env, v) for v in eqn.invars)
        results = tuple(next(self._numbers) for _ in eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
        equation = Equation(
            primitive=eqn.primitive,
            params=params_of(eqn),
            operands=operands,
            operand_shapes=tuple(tuple(getattr(v.aval, "shape", ())) for v in eqn.invars),
            results=results,
            result_avals=tuple(v.aval for v in eqn.outvars),
            bodies=tuple(self._bodies(eqn, site)),
            name_stack=site.stack,
            line=site.line,
            has_effects=bool(eqn.effects),
        )
        return equation if results else self._with_result(equation)

    def _with_result(self, equation: Equation) -> Equation:
        """A scan or cond that only acts on the world with a zero as result, to be named by."""
        kind = equation.primitive.name
        if kind not in ("scan", "cond"):
            return equation
        zero = Const(np.int32(0), jax.ShapeDtypeStruct((), np.int32))
        trips = (equation.params["length"],) if kind == "scan" else ()
        return replace(
            equation,
            results=(next(self._numbers),),
            result_avals=(jax.ShapeDtypeStruct(trips, np.int32),),
            bodies=tuple(replace(b, outputs=(*b.outputs, zero)) for b in equation.bodies),
        )

    def _bodies(self, eqn: Any, site: _Site) -> Iterator[FlatProgram]:
        """The programs of an equation's bodies; arrays that they closed over stay literals."""
        for name in BODIES.get(eqn.primitive.name, ()):
            held = eqn.params[name]
            for body in held if isinstance(held, tuple) else (held,):
                jaxpr, consts = _open(body)
                inputs = tuple(next(self._numbers) for _ in jaxpr.invars)
                env: _Env = dict(zip(jaxpr.invars, inputs, strict=True))
                pairs = zip(jaxpr.constvars, consts, strict=True)
                env.update((v, Const(c, v.aval)) for v, c in pairs)
                self._depth += 1
                program = self._program(jaxpr, jaxpr.invars, inputs, env, site)
                self._depth -= 1
                yield program

    def _read(self, env: _Env, var: Any) -> Ref | Const:
        if isinstance(var, jex.Literal):
            return self._constant(Const(var.val, var.aval))
        return env[var]

    def _constant(self, const: Const) -> Ref | Const:
        """An array in the outermost program becomes an input, so that it can be sharded."""
        # Within bodies, and for scalars, constants stay where they are.
        if self._depth or not const.aval.shape:
            return const
        key = id(const.value)
        if key not in self._homes:
            self._homes[key] = next(self._numbers)
            self._hoisted.append((self._homes[key], const))
        return self._homes[key]


def _open(called: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, and the values of its constvars."""
    return getattr(called, "jaxpr", called), getattr(called, "consts", ())


def _looked(equation: Equation) -> Looked:
    barrier = equation.primitive.name == "optimization_barrier"
    return Looked(
        equation.primitive.name,
        equation.params,
        equation.operands,
        equation.results,
        equation.result_avals,
        "transpose(" in equation.name_stack,
        bool(equation.bodies or equation.has_effects or barrier),
    )


def live(equations: Sequence[Equation], outputs: Sequence[Ref | Const]) -> tuple[Equation, ...]:
    """The equations that something needs: an output, or the world outside."""
    wanted = set(refs(outputs))
    kept: list[Equation] = []
    for equation in reversed(equations):
        # Backwards, so that the readers of an equation are known when it is met.
        if equation.has_effects or wanted.intersection(equation.results):
            wanted.update(refs(equation.operands))
            kept.append(equation)
    return tuple(reversed(kept))
