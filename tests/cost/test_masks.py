"""Masks that a loop is given: XLA for GPUs has one of them, which other trips read as well."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cost.kernels import OUTSIDE
from autopar.cost.memory import step_kernels
from autopar.cost.prices import Prices
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import timed_listing
from autopar.ir.listing import LocalOp
from autopar.planner.planned import Planned

H100 = Cluster.parse("8xh100")
LAYERS, TIME, HEADS, WIDTH = 4, 512, 8, 512


def masked(rows: int) -> Planned:
    """A step of layers of attention that are made again, with so many rows on each device."""

    def layer(x: Any, w: Any) -> Any:
        split = (x @ w).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
        scores = jnp.einsum("bthc,bshc->bhts", split, split).astype(jnp.float32)
        mask = jnp.tril(jnp.ones((TIME, TIME), dtype=bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(x.dtype)
        return x + jnp.einsum("bhts,bshc->bthc", weights, split).reshape(x.shape), None

    def loss(ws: Any, x: Any) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)), ()

    ws = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8 * rows, TIME, WIDTH), jnp.bfloat16)
    return autopar.parallelize(step, cluster=H100, mesh=8, cache=False).planned(ws, x)


@pytest.mark.parametrize(("rows", "reads"), [(16, True), (1, False)])
def test_a_trip_outside_its_loop_reads_the_mask_that_another_loop_is_given(
    rows: int, reads: bool
) -> None:
    """Unless a device has one row, a dim that XLA leaves out of the trip's own mask."""
    found = masked(rows)
    (program,) = found.program.parts
    graph, listing, mesh = program.part.graph, program.listing, found.plan.mesh
    sizes = Sizes(graph, mesh)
    timed = timed_listing(graph, listing, Prices(H100, mesh), sizes)
    kernels = step_kernels(graph, listing, sizes, timed).stored.kernels
    shape = (rows, HEADS, TIME, TIME)
    (mask,) = (
        step.results[0]
        for step in listing.block.instructions
        if isinstance(step, LocalOp)
        and (op := sizes.op(step.equation)).results[0].dtype == "bool"
        and sizes.made(step, op) == shape
    )
    assert any(mask in k.makes for k in kernels)
    assert any(k.at == OUTSIDE and mask in k.reads for k in kernels) is reads
