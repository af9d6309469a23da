"""Flattens a jaxpr: calls are inlined, loops stay equations that hold flattened bodies."""

from __future__ import annotations
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
import jax
import numpy as np
from jax.extend import core as jex
from autopar.frontend.compat import is_kernel, line_of, name_stack_of, params_of, traced_beside
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, refs
import functools
from collections.abc import Callable, Iterable, Sequence
from jax import lax
from jax.extend import core

# Call primitives that mean nothing to a planner, and the parameter that holds their jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",
    "xla_metadata_call": "jaxpr",
}
# Kept as ops with bodies. Inlining remat would let XLA undo it.
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}

_Env = dict[Any, Ref | Const]


def flatten(closed: Any, kept: Collection[str] = ()) -> tuple[FlatProgram, tuple[Any, ...]]:
    """The program of a closed jaxpr, and the closed-over arrays that are its last inputs.

    Arrays that jitted functions within closed over are among them, each once. Equations that
    nothing needs are dropped. Primitives named in `kept` are not written out.
    """
    return _Flattener(kept).whole(closed)


@dataclass(frozen=True)
class _Site:
    """Where a jaxpr is called: its name stack and the user's line."""

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
        heads = (*jaxpr.invars, *jaxpr.constvars)
        inputs = tuple(next(self._numbers) for _ in heads)
        env: _Env = dict(zip(heads, inputs, strict=True))
        homes = zip(closed.consts, inputs[len(jaxpr.invars) :], strict=True)
        self._homes.update((id(const), ref) for const, ref in homes)
        program = self._program(jaxpr, heads, inputs, env, _Site())
        read = {o for e in program.equations for o in refs(e.operands)}
        read.update(refs(program.outputs))
        extra = [(ref, const) for ref, const in self._hoisted if ref in read]
        whole = FlatProgram(
            (*program.inputs, *(ref for ref, _ in extra)),
            (*program.input_avals, *(const.aval for _, const in extra)),
            program.equations,
            program.outputs,
        )
        return whole, (*closed.consts, *(const.value for _, const in extra))

    def _body(self, jaxpr: Any, consts: Sequence[Any], site: _Site) -> FlatProgram:
        """The program of a loop's body; arrays that it closed over stay literals."""
        inputs = tuple(next(self._numbers) for _ in jaxpr.invars)
        env: _Env = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((v, Const(c, v.aval)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        self._depth += 1
        program = self._program(jaxpr, jaxpr.invars, inputs, env, site)
        self._depth -= 1
        return program

    def _program(
        self, jaxpr: Any, heads: Sequence[Any], inputs: tuple[Ref, ...], env: _Env, site: _Site
    ) -> FlatProgram:
        equations = list(self._equations(jaxpr, env, site))
        outputs = tuple(self._read(env, v) for v in jaxpr.outvars)
        kept = live(equations, outputs)
        return FlatProgram(inputs, tuple(v.aval for v in heads), kept, outputs)

    def _equations(self, jaxpr: Any, env: _Env, site: _Site) -> Iterator[Equation]:
        for eqn in jaxpr.eqns:
            here = site.at(eqn)
            inner = _CALLS.get(eqn.primitive.name)
            if inner is not None and inner in eqn.params:
                called = eqn.params[inner]
            else:
                called = self._written_out(eqn)
            if called is not None:
                yield from self._inlined(eqn, called, env, here)
            else:
                yield self._kept(eqn, env, here)

    def _inlined(self, eqn: Any, called: Any, env: _Env, site: _Site) -> Iterator[Equation]:
        jaxpr, consts = _opened(called)
        inner: _Env = {
            v: self._constant(Const(c, v.aval))
            for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        inner.update(zip(jaxpr.invars, (self._read(env, v) for v in eqn.invars), strict=True))
        yield from self._equations(jaxpr, inner, site)
        for outer, v in zip(eqn.outvars, jaxpr.outvars, strict=True):
            env[outer] = self._read(inner, v)

    def _written_out(self, eqn: Any) -> Any | None:
        """The closed jaxpr that an equation stands for, where it does for one."""
        primitive = eqn.primitive
        if primitive.name in self._names_kept or (is_foreign(primitive) and is_kernel(primitive)):
            return None
        fun = meaning(eqn)
        return None if fun is None else traced_beside(eqn, fun)

    def _kept(self, eqn: Any, env: _Env, site: _Site) -> Equation:
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
        for name in _BODIES.get(eqn.primitive.name, ()):
            held = eqn.params[name]
            for body in held if isinstance(held, tuple) else (held,):
                jaxpr, consts = _opened(body)
                yield self._body(jaxpr, consts, site)

    def _read(self, env: _Env, var: Any) -> Ref | Const:
        if isinstance(var, jex.Literal):
            return self._constant(Const(var.val, var.aval))
        return env[var]

    def _constant(self, const: Const) -> Ref | Const:
        """An array in the outermost program becomes an input, so that it can be sharded."""
        if self._depth or not const.aval.shape:
            return const
        key = id(const.value)
        if key not in self._homes:
            self._homes[key] = next(self._numbers)
            self._hoisted.append((self._homes[key], const))
        return self._homes[key]


def _opened(called: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, and the values of its constvars."""
    return getattr(called, "jaxpr", called), getattr(called, "consts", ())


def live(equations: Sequence[Equation], outputs: Sequence[Ref | Const]) -> tuple[Equation, ...]:
    """The equations that something needs: an output, or the world outside."""
    wanted = set(refs(outputs))
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.has_effects or wanted.intersection(equation.results):
            wanted.update(refs(equation.operands))
            kept.append(equation)
    return tuple(reversed(kept))




# -- written_out -- Primitives that stand for a program of others, and the function that JAX compiles in their place.
# 
# An exported plan has this file's code in it: it asks for nothing but JAX.



# ---- what primitives stand for ----

# Calls of functions that JAX compiles in line, and sums over what vmap gave a name.
_CALLING = ("composite", "custom_linear_solve", "linear_call", "remat_opt")
_SUMMING = ("psum", "pmax", "pmin")
_REDUCING = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")


def meaning(eqn: Any) -> Callable[..., Any] | None:
    """The function of an equation's operands that it stands for; None where it is to stay.

    It is one for a loop that vmap lets end at a trip of its own for each row, for calls such as a
    linear solve, a reduction over a dim that vmap gave a name or over none, and another package's
    primitive.
    """
    primitive, params = eqn.primitive, eqn.params
    if primitive.name == "while":
        has_rows = params["cond_jaxpr"].out_avals[0].shape
        return until_last_row(params) if has_rows else None
    if any(getattr(v.aval, "shape", None) is None for v in eqn.invars):
        return None
    if primitive.name == "call_hi_primitive":  # from JAX 0.12 on, implicit roots and expm are
        return lambda *operands: primitive.to_lojax(*operands, **params)
    if primitive.name in _REDUCING and not params["axes"]:
        return lambda operand: operand  # as JAX leaves a mean over the dims of a scalar
    over_rows = (
        primitive.name in _SUMMING
        and params.get("axis_index_groups") is None
        and all(isinstance(axis, int) for axis in params["axes"])
    )
    if over_rows or primitive.name in _CALLING or is_foreign(primitive):
        return lambda *operands: primitive.impl(*operands, **params)
    return None


def is_foreign(primitive: Any) -> bool:
    """Whether a package other than JAX made the primitive, and can run it."""
    fun: Any = primitive.impl
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__module__", "jax")).partition(".")[0] not in ("jax", "jaxlib")


def until_last_row(params: dict[str, Any]) -> Callable[..., Any]:
    """The loop that goes on while any row does, and leaves rows that have ended as they are.

    It carries which rows go on. One that has ended would never go on again, so the outcome is that
    of JAX's own form, which asks all rows twice a trip.
    """
    test, body = (core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    tests, consts = params["cond_nconsts"], params["body_nconsts"]

    def loop(*operands: Any) -> Sequence[Any]:
        of_test, of_body = operands[:tests], operands[tests : tests + consts]
        start = operands[tests + consts :]
        (goes_on,) = test(*of_test, *start)
        rows = tuple(range(goes_on.ndim))

        def any_goes_on(state: Iterable[Any]) -> Any:
            goes_on, *_ = state
            return lax.reduce_or(goes_on, rows)

        def trip(state: Iterable[Any]) -> list[Any]:
            goes_on, *held = state
            left = [
                lax.select(lax.broadcast_in_dim(goes_on, old.shape, rows), new, old)
                for new, old in zip(body(*of_body, *held), held, strict=True)
            ]
            (still,) = test(*of_test, *left)
            return [lax.bitwise_and(goes_on, still), *left]

        _, *found = lax.while_loop(any_goes_on, trip, [goes_on, *start])
        return found

    return loop
