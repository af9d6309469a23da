"""Turns a listing and its sealed program into one function of local pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.ir.host_calls import HOST_CALLS
from autopar.ir.sharding import MeshShape
from autopar.ir.spmd import Block, Fence, LocalOp, Loop, Move, SpmdProgram
from autopar.runtime.callbacks import HostCalls, run_host_call
from autopar.runtime.local import Local, local_run
from autopar.runtime.moves import local_slice, run_move

Env = dict[str, Any]


def local_function(
    program: FlatProgram,
    listing: SpmdProgram,
    mesh: MeshShape,
    platform: str = "cpu",
    calls: HostCalls | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The step on one device's pieces, to run under shard_map over the whole mesh.

    `calls` is told of what the Python that the step calls has raised.
    """
    emitter = _Emitter(program, mesh, platform, calls or HostCalls())

    def step(*pieces: Any) -> tuple[Any, ...]:
        return emitter.run_block(listing.block, program.outputs, pieces)

    return step


class _Emitter:
    """Interprets blocks; equations are found in the sealed program by their path."""

    def __init__(
        self, program: FlatProgram, mesh: MeshShape, platform: str, calls: HostCalls
    ) -> None:
        self._program, self._mesh, self._platform, self._calls = program, mesh, platform, calls
        self._same = dict(_renamed(program))

    def run_block(
        self, block: Block, outputs: Sequence[int | Const], pieces: Sequence[Any]
    ) -> tuple[Any, ...]:
        """A block's outputs; `outputs` are the sealed program's, for those that are literals."""
        env: Env = dict(zip(block.inputs, pieces, strict=True))
        for step in block.instructions:
            if isinstance(step, LocalOp):
                self._run(step, env)
            elif isinstance(step, Move):
                env[step.result] = self._move(step, env)
            elif isinstance(step, Fence):
                fenced = fence([env[s] for s in step.sources], step.tied, self._platform)
                if step.stored:
                    fenced = [stored(value, self._platform) for value in fenced]
                env.update(zip(step.results, fenced, strict=True))
            else:
                self._loop(step, env)
        return tuple(
            env[name] if name is not None else _constant(self._literal(outputs[i]))
            for i, name in enumerate(block.outputs)
        )

    def _literal(self, ref: int | Const) -> Const:
        """The literal behind an operand or output, also through inlined remat bodies."""
        while not isinstance(ref, Const):
            ref = self._same[ref]
        return ref

    def _equation(self, path: tuple[int, ...]) -> Equation:
        program = self._program
        for op, body in zip(path[:-1:2], path[1::2], strict=True):
            program = program.equations[op].bodies[body]
        return program.equations[path[-1]]

    def _move(self, move: Move, env: Env) -> Any:
        return run_move(env[move.source], move, self._mesh)

    def _run(self, run: LocalOp, env: Env) -> None:
        equation = self._equation(run.equation)
        shapes = equation.operand_shapes
        operands = [
            env[name] if name is not None else self._constant_piece(equation, i, run)
            for i, name in enumerate(run.operands)
        ]
        result_shapes = tuple(tuple(a.shape) for a in equation.result_avals)
        local = Local(
            self._mesh,
            run.operand_shardings,
            run.result_shardings,
            shapes,
            result_shapes,
            self._platform,
        )
        with jax.named_scope(_scope(equation)):
            if equation.primitive.name in HOST_CALLS:
                results = run_host_call(equation, operands, local, self._calls)
            else:
                results = local_run(equation.primitive.name)(equation, operands, local)
        env.update(zip(run.results, results, strict=True))

    def _constant_piece(self, equation: Equation, index: int, run: LocalOp) -> Any:
        """A literal operand; an array among them is cut to the piece that is asked for."""
        value = self._literal(equation.operands[index]).value
        for dim, axes in enumerate(run.operand_shardings[index].dims):
            if axes:
                value = local_slice(jnp.asarray(value), dim, axes, self._mesh)
        return value

    # -- loops -----------------------------------------------------------------------------

    def _loop(self, loop: Loop, env: Env) -> None:
        equation = self._equation(loop.equation)
        operands = [
            env[name] if name is not None else _constant(self._literal(equation.operands[i]))
            for i, name in enumerate(loop.operands)
        ]
        run = {"scan": self._scan, "while": self._while, "cond": self._cond}
        results = run[equation.primitive.name](loop, equation, operands)
        env.update(zip(loop.results, results, strict=True))

    def _scan(self, loop: Loop, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        params, program = equation.params, equation.bodies[0]
        consts = list(operands[: params["num_consts"]])
        start = params["num_consts"] + params["num_carry"]

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out = self.run_block(loop.bodies[0], program.outputs, [*consts, *carry, *slices])
            return list(out[: params["num_carry"]]), list(out[params["num_carry"] :])

        carry, stacked = lax.scan(
            body,
            list(operands[params["num_consts"] : start]),
            list(operands[start:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _while(self, loop: Loop, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        test_consts, body_consts = operands[:tests], operands[tests : tests + bodies]
        test_program, body_program = equation.bodies

        def test(carry: Iterable[Any]) -> Any:
            return self.run_block(loop.bodies[0], test_program.outputs, [*test_consts, *carry])[0]

        def body(carry: Iterable[Any]) -> list[Any]:
            given = [*body_consts, *carry]
            return list(self.run_block(loop.bodies[1], body_program.outputs, given))

        return list(lax.while_loop(test, body, list(operands[tests + bodies :])))

    def _cond(self, loop: Loop, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        def branch(block: Block, program: FlatProgram) -> Callable[..., list[Any]]:
            return lambda *given: list(self.run_block(block, program.outputs, given))

        pairs = zip(loop.bodies, equation.bodies, strict=True)
        branches = [branch(b, p) for b, p in pairs]
        platforms = equation.params.get("branches_platforms")
        if platforms is None:
            return list(lax.switch(operands[0], branches, *operands[1:]))
        # The branch of the platform that is compiled for: others may not compile on it.
        named = zip(platforms, branches, strict=True)
        by_name = {name: run for names, run in named for name in names or ("default",)}
        return list(lax.platform_dependent(*operands[1:], **by_name))


def _renamed(program: FlatProgram) -> Iterator[tuple[int, int | Const]]:
    """The values that inputs and results of remat equations are other names for."""
    for equation in program.walk():
        if equation.primitive.name in ("remat2", "checkpoint"):
            body = equation.bodies[0]
            yield from zip(body.inputs, equation.operands, strict=True)
            yield from zip(equation.results, body.outputs, strict=True)
        elif equation.primitive.name == "optimization_barrier":
            yield from zip(equation.results, equation.operands, strict=True)


def _constant(const: Const) -> Any:
    """A literal as an array of its own type, which loops insist on."""
    return jnp.asarray(const.value, dtype=const.aval.dtype)


def _scope(equation: Equation) -> str:
    """The scope of an op in profiles and HLO metadata: the user's modules and line."""
    return (
        "/".join(
            p for p in (equation.name_stack.replace("(", "_").replace(")", ""), equation.line) if p
        )
        or "step"
    )


# -- fences ------------------------------------------------------------------------------------


def fence(values: Sequence[Any], tied: bool, platform: str) -> Sequence[Any]:
    """The values, as ones that the compiler does not know to be the same; bits are kept.

    XLA:CPU drops barriers before it merges equal instructions. There, values that are `tied` to
    the last of them are also chosen by a test that never holds, on what that last one is at run
    time: they differ to the compiler, and are not ready before it is.
    """
    fenced = lax.optimization_barrier(tuple(values))
    last = fenced[-1]
    if not tied or platform != "cpu" or not jnp.issubdtype(last.dtype, jnp.floating):
        return fenced
    never = _never(last)
    return [_chosen(never, value) for value in fenced]


def stored(value: jax.Array, platform: str) -> jax.Array:
    """A value behind a barrier, with the same bits for each reader.

    XLA:CPU drops the barrier, and fuses what made the value into each of its readers, which may
    contract products and sums otherwise. There the value also goes through a loop that never runs:
    nothing is fused with it, and it copies nothing.
    """
    if platform != "cpu" or not value.size:
        return value
    start = (_never(value), value)
    return lax.while_loop(lambda c: c[0], lambda c: (~c[0], jnp.zeros_like(c[1])), start)[1]


def _never(value: jax.Array) -> jax.Array:
    """False, though the compiler cannot tell before the value is there."""
    first = lax.reshape(value, (value.size,))[0]
    return (first != first) & (first == first)


def _chosen(never: jax.Array, value: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _chosen(never, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jnp.where(never, jnp.zeros_like(value), value)
