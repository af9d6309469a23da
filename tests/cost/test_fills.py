"""Buffers that scatters and scans begin with: zeros, all alike at once, or memory that is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.cost.memory import held_spans
from autopar.ir.listing import LocalOp
from autopar.ir.sharding import MeshShape
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
from tests.runtime.aot_programs import needs_gpu_compiler

H100 = Cluster.parse("1xh100")
TIME, BATCH, WIDTH, LAYERS = 64, 256, 512, 3
STACK_BYTES = 4 * TIME * BATCH * WIDTH


def recurrent(weights: Any, batch: jax.Array) -> Any:
    """Recurrent layers. A trip stacks its state twice: as a result, and for backward."""

    def loss(weights: Any) -> jax.Array:
        x = batch
        for w in weights:

            def one(h: jax.Array, x: jax.Array, w: jax.Array = w) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(x + h @ w)
                return h, h

            _, x = jax.lax.scan(one, jnp.zeros(x.shape[1:]), x)
        return jnp.mean(x**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


def planned() -> Planned:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((TIME, BATCH, WIDTH), jnp.float32)
    step = autopar.parallelize(recurrent, cluster="1xh100", cache=False, remat=False)
    return step.planned(weights, batch)


def test_each_stack_is_there_from_its_loop_on() -> None:
    """Three of each forward loop, that of the first backward loop, and the loss's gradient.

    The states are stacked twice in the step, but once in what is compiled.
    """
    prediction = planned().plan.prediction
    held = prediction.peak_bytes - prediction.argument_bytes
    assert held == pytest.approx((3 * LAYERS + 1 + 1) * STACK_BYTES, rel=0.05)


@needs_gpu_compiler
def test_xla_holds_as_much() -> None:
    (program,) = programs_of(planned(), H100, Target.of(H100))
    export: Any = program.export
    compiled = compile_ahead(export())
    assert program.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)


def scattered(weights: Any, batch: Any) -> Any:
    """Messages over edges, summed up at their ends, some rounds of it."""

    def loss(weights: Any) -> jax.Array:
        h = batch["nodes"]
        for w in weights:
            sums = jnp.zeros_like(h).at[batch["ends"]].add(h[batch["starts"]] @ w)
            h = jnp.tanh(sums)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


def test_all_scatters_start_from_zeros_made_at_once() -> None:
    nodes, edges = 1024, 4096
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS
    batch = {
        "nodes": jax.ShapeDtypeStruct((nodes, 64), jnp.float32),
        "starts": jax.ShapeDtypeStruct((edges,), jnp.int32),
        "ends": jax.ShapeDtypeStruct((edges,), jnp.int32),
    }
    step = autopar.parallelize(scattered, cluster="1xh100", cache=False)
    (program,) = step.planned(weights, batch).program.parts
    spans = held_spans(program.part.graph, program.listing, MeshShape.of((1,))).spans
    scatters = [
        step
        for step in program.listing.block.instructions
        if isinstance(step, LocalOp)
        and program.part.graph.op_at(step.equation).kind == "scatter-add"
    ]
    made = [spans[step.operands[0]][0] for step in scatters if step.operands[0] is not None]
    assert len(made) == 2 * LAYERS - 1
    assert len(set(made)) == 1


@pytest.mark.parametrize(
    ("dtype", "number"), [(jnp.bool_, True), (jnp.complex64, 0), (jnp.int8, 3)]
)
def test_buffers_of_every_dtype_may_be_filled(dtype: Any, number: complex) -> None:
    def step(table: jax.Array, batch: Any) -> Any:
        marks = [jnp.full(table.shape, number, dtype).at[at].set(table[at]) for at in batch]
        return table, marks

    table = jax.ShapeDtypeStruct((64, 128), dtype)
    batch = [jax.ShapeDtypeStruct((8,), jnp.int32)] * 2
    plan = autopar.plan(step, table, batch, cluster="2xh100", mesh="2", method="dp", cache=False)
    assert plan.prediction.peak_bytes > plan.prediction.argument_bytes


Update = Callable[[jax.Array, jax.Array], jax.Array]


def looked_up(update: Update) -> Planned:
    """A step that looks a few rows of a table up, and updates it."""
    table = jax.ShapeDtypeStruct((4096, 64), jnp.float32)

    def step(table: jax.Array, rows: jax.Array) -> Any:
        return update(table, jax.grad(lambda t: jnp.sum(jnp.tanh(t[rows])))(table)), ()

    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    return autopar.parallelize(step, cluster="1xh100", cache=False).planned(table, rows)


@pytest.mark.parametrize(
    ("update", "tables"),
    [
        (lambda t, g: t - g, 1),
        (lambda t, g: t - jnp.where(t > 1.0, g, 0.0), 2),
        (lambda t, g: t - jnp.maximum(g, 0.0), 2),
        (lambda t, g: t - jnp.maximum(g, 1.0), 1),
        (lambda t, g: t - (g + 0.0), 1),
    ],
)
def test_zeros_that_a_scatter_writes_into_are_kept_for_those_that_read_zeros(
    update: Update, tables: int
) -> None:
    """As a rectified value, or one under a mask, does; what adds zeros reads none."""
    prediction = looked_up(update).plan.prediction
    held = prediction.peak_bytes - prediction.argument_bytes
    assert held == pytest.approx(tables * 4096 * 64 * 4, rel=0.01)


@needs_gpu_compiler
def test_the_compiler_keeps_zeros_for_those_that_read_them() -> None:
    (program,) = programs_of(looked_up(lambda t, g: t - jnp.maximum(g, 0.0)), H100, Target.of(H100))
    export: Any = program.export
    compiled = compile_ahead(export())
    assert program.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)
