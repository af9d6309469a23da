"""Runs a sealed step whose leaves may be cut, and checks the types that it states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend.traced import Const, FlatProgram, TracedStep
from tests.frontend.evaluating import evaluate

# Quick to compile, and rounded where the program says so.
PLAINLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}


def run_step(step: TracedStep, leaves: Sequence[Any]) -> list[Any]:
    """The flat results of a step on its flat arguments, cut and joined as its pieces say."""
    check_shapes(step.program)
    given = [*leaves, *step.constants]
    inputs = [
        given[p.leaf] if p.stop is None else given[p.leaf][p.start : p.stop]
        for p in step.input_pieces
    ]
    run = jax.jit(lambda given: evaluate(step.program, given), compiler_options=PLAINLY)
    outputs = run(inputs if step.input_pieces else given)
    if not step.output_pieces:
        return list(outputs)
    joined: dict[int, list[Any]] = {}
    for piece, value in zip(step.output_pieces, outputs, strict=True):
        joined.setdefault(piece.leaf, []).append(value)
    return [v[0] if len(v) == 1 else jnp.concatenate(v) for v in joined.values()]


def check_shapes(program: FlatProgram) -> None:
    """Fail unless equations read the shapes that were made, and bodies what they are given."""
    shapes = {ref: tuple(aval.shape) for ref, aval in program.avals()}
    for equation in program.equations:
        read = tuple(
            tuple(o.aval.shape) if isinstance(o, Const) else shapes[o] for o in equation.operands
        )
        assert read == equation.operand_shapes, equation
        for body in equation.bodies:
            check_shapes(body)
