"""Plans of small steps, and a compiler that answers what it is told to."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.api import Planned
from autopar.ir.compiled import CheckLevel, Compiled, CompiledCollective
from autopar.ir.listing import Block, Listing, Loop, Move
from autopar.ir.verification import Verification
from autopar.runtime.aot.program import AotProgram
from autopar.verifying.shrink import Called
from autopar.verifying.verify import Inquiry, verify_planned

SHAPES = (
    {
        "up": jax.ShapeDtypeStruct((64, 128), jnp.float32),
        "down": jax.ShapeDtypeStruct((128, 64), jnp.float32),
    },
    jax.ShapeDtypeStruct((256, 64), jnp.float32),
)


def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss_of(w: Any) -> jax.Array:
        return jnp.mean((batch @ w["up"] @ w["down"]) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad), loss


def planned_for(cluster: str, method: str = "dp", mesh: Any = (8,)) -> Planned:
    """The step in one program."""
    step = autopar.parallelize(train_step, cluster=cluster, method=method, mesh=mesh)
    planned = step.planned(*SHAPES)
    assert isinstance(planned, Planned)
    return planned


def asked(planned: Any, inquiry: Inquiry, args: Sequence[Any] = SHAPES) -> Verification:
    """What verifying the step's plan finds."""
    spec = autopar.parallelize(train_step, cluster="8xcpu").spec
    return verify_planned(planned, Called(spec, tuple(args), {}), inquiry)


def as_planned(planned: Planned) -> Compiled:
    """A compiler's answer that is what was planned."""
    predicted = planned.plan.prediction
    return Compiled(
        target="told",
        compiler="none",
        argument_bytes=predicted.argument_bytes,
        peak_bytes=predicted.peak_bytes,
        collectives=tuple(
            CompiledCollective(c.kind, c.axes, m.value.dtype, c.nbytes, c.runs, "", m.line)
            for m, c in planned.program.parts[0].listing.collectives()
        ),
        seconds=predicted.seconds,
        exposed_seconds=predicted.exposed_seconds,
    )


def answering(compiled: Compiled, level: CheckLevel = CheckLevel.MEMORY) -> Inquiry:
    """An inquiry whose compiler gives that answer to everything."""

    def compile(
        export: Callable[[], AotProgram], asked_level: CheckLevel, limit_seconds: float
    ) -> Compiled:
        assert asked_level is level
        assert limit_seconds == 7.0
        return compiled

    return Inquiry(level, limit_seconds=7.0, compile=compile)


def without_reduction(program: Listing) -> Listing:
    """The program with its first sum over devices left out."""
    found = False

    def cut(block: Block) -> Block:
        nonlocal found
        made: list[Any] = []
        for step in block.instructions:
            if isinstance(step, Loop):
                made.append(replace(step, bodies=tuple(map(cut, step.bodies))))
            elif isinstance(step, Move) and not found and _sums(step):
                found = True
                made.append(replace(step, steps=()))
            else:
                made.append(step)
        return replace(block, instructions=tuple(made))

    broken = replace(program, block=cut(program.block))
    assert found
    return broken


def _sums(move: Move) -> bool:
    return [s.kind for s in move.steps] == ["all-reduce"]
