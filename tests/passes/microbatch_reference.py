"""Runs a step as its Batching says, one microbatch after the other, with plain JAX operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend import StepSpec
from autopar.frontend.microbatch.part_trace import MicrobatchTrace, trace_microbatch
from autopar.frontend.rewrite.rescale import rescale
from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.ir.batching import FREE, Accumulator, BatchGraphs, Batching, Moment, Rows, When
from autopar.passes.batch.exact import Exact
from autopar.rules import attach_rules
from tests.passes.driving import setting

Env = dict[str, Any]
_FEW = 200  # so few ops run faster one by one, as their shapes come again, than compiled

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "same": lambda a, b: a,
}


@dataclass(frozen=True)
class Cut:
    """A step in both traces, and how it is cut."""

    trace: MicrobatchTrace
    batching: Batching

    def __call__(self, *args: Any) -> Any:
        """What the step gives, microbatch by microbatch."""
        flat = [*jax.tree.leaves(args), *self.trace.whole.constants]
        return jax.tree.unflatten(self.trace.whole.out_tree, _Run(self, flat).outputs())


def batch_graphs(trace: MicrobatchTrace) -> BatchGraphs:
    """What the batch pass is given of two traces."""
    whole, part = (attach_rules(t.graph) for t in (trace.whole, trace.part))
    return BatchGraphs(whole, part, trace.microbatches, trace.index, trace.sources)


def cut(fun: Callable[..., Any], args: Sequence[Any], microbatches: int, **options: Any) -> Cut:
    """A step cut by `Exact`, its first argument being state; raises what it raises."""
    spec = StepSpec(fun, state_argnums=(0,))
    trace = trace_microbatch(spec, args, {}, microbatches, **options)
    batching = Exact().run(batch_graphs(trace), setting((1,)))
    batching.verify()
    return Cut(trace, batching)


def rewritten(step: Cut) -> Cut:
    """The step with the factors that its batching can do without taken out of its loops."""
    rescales = step.batching.rescales
    whole, part = (rescale(t, rescales) for t in (step.trace.whole, step.trace.part))
    trace = replace(step.trace, whole=whole, part=part)
    return Cut(trace, Exact().run(batch_graphs(trace), setting((1,))))


class _Run:
    """One run: values that are there once by name, and those of each microbatch."""

    def __init__(self, step: Cut, flat: Sequence[Any]) -> None:
        self._batching = batching = step.batching
        self._program, self._graph = step.trace.part.program, batching.graph
        self._live = _live(batching)
        self._own: list[Env] = [{batching.index: np.int32(i)} for i in range(batching.microbatches)]
        self._once: Env = {}
        self._run_hoist(step.trace.whole.program, flat)
        names = [i.value.name for i in self._graph.inputs if i.value.name != batching.index]
        whole_rows = batching.rows_of
        for name, value in zip(names, flat, strict=True):
            if name in whole_rows:
                for i, own in enumerate(self._own):
                    own[name] = self._slice(value, whole_rows[name], i)
            else:
                self._once[name] = value

    def outputs(self) -> list[Any]:
        """The step's flat outputs."""
        self._run_once(FREE.__eq__)
        for loop in range(self._batching.loops):
            self._run_loop(loop)
            self._run_once(Moment(When.ONCE, (loop,)).__eq__)
        return [self._output(o) for o in self._program.outputs]

    def _output(self, output: int | Const) -> Any:
        if isinstance(output, Const):
            return _constant(output)
        name = f"%{output}"
        if name not in self._batching.rows_of:
            return self._once[name]
        return self._joined([own[name] for own in self._own], self._batching.rows_of[name])

    def _run_hoist(self, whole: FlatProgram, flat: Sequence[Any]) -> None:
        hoist = self._batching.hoist
        if hoist is None:
            return
        env = {f"%{r}": v for r, v in zip(whole.inputs, flat, strict=True)}
        for i in hoist.equations:
            _run_equation(whole.equations[i], env)
        names = (o for o in hoist.graph.outputs if isinstance(o, str))
        self._once.update(zip(hoist.values, (env[o] for o in names), strict=True))

    def _ops(self, chosen: Callable[[Any], bool]) -> list[int]:
        return [i for i in sorted(self._live) if chosen(self._batching.moments[i])]

    def _run_once(self, chosen: Callable[[Any], bool]) -> None:
        ops = self._ops(chosen)
        made = {v.name for i in ops for v in self._graph.ops[i].results}
        read = {n for i in ops for n in self._graph.ops[i].value_operands} - made
        run = _compiled(self._program, ops, sorted(made))
        self._once.update(run({n: self._once[n] for n in sorted(read)}))

    def _run_loop(self, loop: int) -> None:
        ops = self._ops(lambda m: m.when is When.LOOP and loop in m.loops)
        graph = self._graph
        made = {v.name for i in ops for v in graph.ops[i].results}
        sums = {a.value: a for a in self._batching.accumulators if a.loop == loop}
        elsewhere = [i for i in self._live if i not in ops]
        later = {n for i in elsewhere for n in graph.ops[i].value_operands}
        later |= {o for o in graph.outputs if isinstance(o, str)}
        run = _compiled(self._program, ops, sorted(made & (later | set(sums))))
        read = {n for i in ops for n in graph.ops[i].value_operands} - made
        parts: list[Env] = []
        for own in self._own:
            given = {n: own[n] if n in own else self._once[n] for n in sorted(read)}
            found = run(given)
            parts.append(found)
            own.update((n, v) for n, v in found.items() if n not in sums)
        for name, accumulator in sums.items():
            self._once[name] = _accumulated([p[name] for p in parts], accumulator)

    def _slice(self, value: Any, rows: Rows, index: int) -> Any:
        shape, m = np.shape(value), self._batching.microbatches
        split = (*shape[: rows.dim], rows.outer, m, -1, *shape[rows.dim + 1 :])
        size = shape[rows.dim] // m
        own = (*shape[: rows.dim], size, *shape[rows.dim + 1 :])
        return jnp.reshape(jnp.take(jnp.reshape(value, split), index, axis=rows.dim + 1), own)

    def _joined(self, pieces: Sequence[Any], rows: Rows) -> Any:
        shape = pieces[0].shape
        split = (*shape[: rows.dim], rows.outer, -1, *shape[rows.dim + 1 :])
        size = shape[rows.dim] * len(pieces)
        whole = jnp.concatenate([jnp.reshape(p, split) for p in pieces], axis=rows.dim + 1)
        return jnp.reshape(whole, (*shape[: rows.dim], size, *shape[rows.dim + 1 :]))


def _accumulated(parts: Sequence[Any], accumulator: Accumulator) -> Any:
    own = parts[0].dtype
    held = [p.astype("float32") for p in parts] if accumulator.dtype == "f32" else parts
    total = reduce(_COMBINE[accumulator.combiner], held)
    return total.astype(own) if accumulator.dtype else total


def _live(batching: Batching) -> frozenset[int]:
    """Ops whose results anybody reads, hoisted values being read from the hoist."""
    known = set(batching.hoist.values) if batching.hoist is not None else set[str]()
    needed = {o for o in batching.graph.outputs if isinstance(o, str)} - known
    live: set[int] = set()
    for i, op in reversed(list(enumerate(batching.graph.ops))):
        if not op.results or any(v.name in needed for v in op.results):
            live.add(i)
            needed.update(set(op.value_operands) - known)
    return frozenset(live)


# -- equations -----------------------------------------------------------------------------


def _compiled(
    program: FlatProgram, ops: Sequence[int], wanted: Sequence[str]
) -> Callable[[Env], Env]:
    def run(given: Env) -> Env:
        env = dict(given)
        for i in ops:
            _run_equation(program.equations[i], env)
        return {n: env[n] for n in wanted}

    return jax.jit(run) if len(ops) > _FEW else run


def run_program(program: FlatProgram, given: Iterable[Any]) -> list[Any]:
    """A sealed program or body, equation by equation."""
    env: Env = {f"%{r}": v for r, v in zip(program.inputs, given, strict=True)}
    for equation in program.equations:
        _run_equation(equation, env)
    return [_read(o, env) for o in program.outputs]


def _read(operand: int | Const, env: Env) -> Any:
    return _constant(operand) if isinstance(operand, Const) else env[f"%{operand}"]


def _constant(const: Const) -> Any:
    return jnp.asarray(const.value, dtype=const.aval.dtype)


def _run_equation(equation: Equation, env: Env) -> None:
    operands = [_read(o, env) for o in equation.operands]
    kind = equation.primitive.name
    if kind in _CONTROL:
        results = _CONTROL[kind](equation, operands)
    else:
        results = equation.primitive.bind(*operands, **equation.params)
        results = results if equation.primitive.multiple_results else [results]
    env.update((f"%{r}", v) for r, v in zip(equation.results, results, strict=True))


def _scan(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    params, body = equation.params, equation.bodies[0]
    first = params["num_consts"]
    last = first + params["num_carry"]

    def trip(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = run_program(body, [*operands[:first], *carry, *slices])
        return out[: last - first], out[last - first :]

    carry, stacked = lax.scan(
        trip,
        list(operands[first:last]),
        list(operands[last:]),
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *stacked]


def _while(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    tests, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    test, body = equation.bodies
    return list(
        lax.while_loop(
            lambda carry: run_program(test, [*operands[:tests], *carry])[0],
            lambda carry: run_program(body, [*operands[tests : tests + consts], *carry]),
            list(operands[tests + consts :]),
        )
    )


def _cond(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    branches = [
        lambda *given, program=program: run_program(program, given) for program in equation.bodies
    ]
    return list(lax.switch(operands[0], branches, *operands[1:]))


_CONTROL: dict[str, Callable[[Equation, Sequence[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
