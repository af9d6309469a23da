"""Runs sealed programs as they stand, on the whole batch or microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend import StepSpec
from autopar.frontend.microbatch.batch_inputs import BatchAxes, batch_inputs
from autopar.frontend.microbatch.part_trace import MicrobatchTrace, trace_microbatch
from autopar.frontend.trace.inline import live
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep
from autopar.ir.batching import Rows

Env = dict[Ref, Any]


def evaluate(program: FlatProgram, given: Sequence[Any]) -> list[Any]:
    """The program's outputs."""
    env = values(program, given)
    return [_read(env, o) for o in program.outputs]


def values(program: FlatProgram, given: Sequence[Any]) -> Env:
    """Every value of the program, bodies left out."""
    env: Env = dict(zip(program.inputs, given, strict=True))
    for equation in program.equations:
        results = _run(equation, [_read(env, o) for o in equation.operands])
        env.update(zip(equation.results, results, strict=True))
    return env


def _read(env: Env, operand: Ref | Const) -> Any:
    if isinstance(operand, int):
        return env[operand]
    return jnp.asarray(operand.value, operand.aval.dtype)


def _run(equation: Equation, given: list[Any]) -> Sequence[Any]:
    kind, params = equation.primitive.name, equation.params
    if kind == "scan":
        return _scan(equation, given)
    if kind == "cond":
        branches = [lambda *a, b=b: evaluate(b, a) for b in equation.bodies]
        return lax.switch(given[0], branches, *given[1:])
    if kind == "while":
        return _while(equation, given)
    if equation.bodies:
        return evaluate(equation.bodies[0], given)
    out = equation.primitive.bind(*given, **params)
    return out if equation.primitive.multiple_results else [out]


def _scan(equation: Equation, given: list[Any]) -> Sequence[Any]:
    params, body = equation.params, equation.bodies[0]
    consts, start = given[: params["num_consts"]], params["num_consts"] + params["num_carry"]

    def trip(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = evaluate(body, [*consts, *carry, *slices])
        return out[: params["num_carry"]], out[params["num_carry"] :]

    carry, stacked = lax.scan(
        trip,
        given[params["num_consts"] : start],
        given[start:],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *stacked]


def _while(equation: Equation, given: list[Any]) -> Sequence[Any]:
    tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    test, body = equation.bodies
    return lax.while_loop(
        lambda carry: evaluate(test, [*given[:tests], *carry])[0],
        lambda carry: evaluate(body, [*given[tests : tests + bodies], *carry]),
        given[tests + bodies :],
    )


def cut(
    fun: Callable[..., Any], args: Sequence[Any], count: int, axes: BatchAxes | None = None
) -> MicrobatchTrace:
    """A function of whole arguments, cut into microbatches."""
    return trace_microbatch(StepSpec(fun, state_argnums=()), args, {}, count, axes)


def inputs_of(
    step: MicrobatchTrace, args: Any, number: int, axes: BatchAxes | None = None
) -> list[Any]:
    """What `step.part` is given for one microbatch of whole arguments, or `step.whole` at -1."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
    if number < 0:
        return [*leaves, *step.whole.constants]
    batch = batch_inputs(step.whole, axes)
    rows = batch.extent // step.microbatches
    for i, axis in batch.axes:
        leaves[i] = lax.slice_in_dim(leaves[i], number * rows, (number + 1) * rows, axis=axis)
    index = [jnp.int32(number)] if step.index else []
    return [*leaves, *index, *step.part.constants]


def slice_of(whole: Any, rows: Rows, number: int, count: int) -> Any:
    """The rows of one microbatch of an array with all of them."""
    whole = _words(whole)
    dim, size = rows.dim, whole.shape[rows.dim] // (rows.outer * rows.inner)
    split = whole.reshape(
        *whole.shape[:dim], rows.outer, count, size // count, rows.inner, *whole.shape[dim + 1 :]
    )
    return split[(slice(None),) * (dim + 1) + (number,)].reshape(
        *whole.shape[:dim], whole.shape[dim] // count, *whole.shape[dim + 1 :]
    )


def _words(array: Any) -> np.ndarray[Any, Any]:
    """An array's items; random keys become structures of their words."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(array))
        return np.ascontiguousarray(data).view(np.dtype((np.void, data.itemsize * data.shape[-1])))[
            ..., 0
        ]
    return np.asarray(array)


def check_sources(step: MicrobatchTrace, args: Any, axes: BatchAxes | None = None) -> int:
    """Fail unless each top-level source is its rows of the whole's; how many there are."""
    made = {r for e in step.part.program.equations for r in e.results}
    named = {int(n.removeprefix("%")): rows for n, rows in step.sources}
    found = tuple(r for r in named if r in made)

    def run(program: FlatProgram) -> Callable[[list[Any]], list[Any]]:
        needed = replace(program, equations=live(program.equations, found), outputs=found)
        return jax.jit(lambda given: evaluate(needed, given))

    whole = run(step.whole.program)(inputs_of(step, args, -1))
    part = run(step.part.program)
    for number in range(step.microbatches):
        made_here = part(inputs_of(step, args, number, axes))
        for ref, one, own in zip(found, whole, made_here, strict=True):
            want = slice_of(one, named[ref], number, step.microbatches)
            np.testing.assert_array_equal(_words(own), want, err_msg=f"%{ref}")
    return len(found)


def rows_together(
    step: MicrobatchTrace, args: Any, axes: BatchAxes | None = None, axis: int = 0
) -> list[Any]:
    """Every output of the microbatches, put together along the axis of the rows."""
    run = jax.jit(lambda given: evaluate(step.part.program, given))
    parts = [run(inputs_of(step, args, i, axes)) for i in range(step.microbatches)]
    columns = zip(*parts, strict=True)
    return [np.concatenate([np.asarray(p) for p in column], axis) for column in columns]


def same_graphs(left: TracedStep, right: TracedStep) -> bool:
    """Whether two steps have the same ops, names and regions, whatever their sizes."""
    pairs = zip(left.graph.walk(), right.graph.walk(), strict=True)
    return all(
        a.kind == b.kind
        and a.origin == b.origin
        and [v.name for v in a.results] == [v.name for v in b.results]
        for a, b in pairs
    )
