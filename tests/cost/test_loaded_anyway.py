"""What kernels compute again of pieces that they load anyway: nothing stores it."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.cost.kernels import stored_kernels
from autopar.cost.sizes import Sizes
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
from tests.cost.test_merged_products import arrays, planned
from tests.runtime.aot_programs import needs_gpu_compiler

H100 = Cluster.parse("1xh100")
ROWS, SIDE, WIDTH = 64, 64, 64
IMAGE_BYTES = 2 * ROWS * SIDE**2 * WIDTH


@cache
def blocks(count: int, slope: float) -> Planned:
    """A step of convolutions, each with a norm over its pixels and a leaky relu behind it."""
    dims = ("NHWC", "HWIO", "NHWC")

    def loss(ws: Any, h: Any) -> jax.Array:
        for w in ws:
            y = jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=dims)
            wide = y.astype(jnp.float32)
            mean = wide.mean((1, 2), keepdims=True)
            share = jax.lax.rsqrt((wide**2).mean((1, 2), keepdims=True) - mean**2 + 1e-6)
            h = jax.nn.leaky_relu(((wide - mean) * share).astype(h.dtype), slope)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)), ()

    filters = arrays(*[(3, 3, WIDTH, WIDTH)] * count)
    return planned(step, filters, *arrays((ROWS, SIDE, SIDE, WIDTH)))


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_a_block_keeps_what_its_convolution_makes_and_what_the_next_one_reads(slope: float) -> None:
    """And no mask: the gradient of the norm loads what the sign is computed of."""
    few, more = (blocks(count, slope).plan.prediction.peak_bytes for count in (2, 6))
    assert more - few == pytest.approx(4 * 2 * IMAGE_BYTES, rel=0.01)


@needs_gpu_compiler
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_so_it_does_by_xla(slope: float) -> None:
    held = list[int]()
    for count in (2, 6):
        (program,) = programs_of(blocks(count, slope), H100, Target.of(H100))
        export: Any = program.export
        held.append(compile_ahead(export()).peak_bytes)
    assert held[1] - held[0] == pytest.approx(4 * 2 * IMAGE_BYTES, rel=0.01)


@pytest.mark.parametrize(("work", "count"), [(jnp.tanh, 1), (jnp.abs, 0)])
def test_of_what_is_loaded_anyway_only_dear_work_is_stored(work: Any, count: int) -> None:
    """Three sums want the same, beside what it is computed of."""

    def step(w: Any, x: Any) -> Any:
        y = work(x)
        return w, (jnp.sum(y * x, axis=0), jnp.sum(y + x, axis=1), jnp.sum(y - x))

    found = planned(step, *arrays((8,)), *arrays((4096, 4096)))
    (program,) = found.program.parts
    sizes = Sizes(program.part.graph, found.plan.mesh, "gpu")
    given = sizes.inputs(program.listing)
    stored = stored_kernels(program.listing.block, sizes, given, lambda *_: 0)
    large = [n for k in stored.kernels for n in k.makes if stored.nbytes[n] == 2 * 4096**2]
    assert len(large) == count
