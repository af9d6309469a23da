"""What XLA for GPUs computes in what reads it, adds, and writes as it is read."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.cost.kernels import FILL, Stored, stored_kernels
from autopar.cost.sizes import Sizes
from autopar.ir.listing import LocalOp
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
from tests.cost.test_merged_products import arrays, planned
from tests.runtime.aot_programs import needs_gpu_compiler

H100 = Cluster.parse("1xh100")
ROWS, SIDE, WIDTH, LONG = 64, 64, 64, 4096
IMAGE_BYTES = 2 * ROWS * SIDE**2 * WIDTH
HEADS, SEQUENCE, DEPTH = 32, 2048, 128
DIMS = ("NHWC", "HWIO", "NHWC")


def updated(loss: Any, *filters: Any) -> Planned:
    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)), ()

    return planned(step, arrays(*filters), *arrays((ROWS, SIDE, SIDE, WIDTH)))


def convolved(h: Any, w: Any) -> jax.Array:
    return jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=DIMS)


def normed(y: jax.Array) -> jax.Array:
    wide = y.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    share = jax.lax.rsqrt((wide**2).mean((0, 1, 2)) - mean**2 + 1e-6)
    return ((wide - mean) * share).astype(y.dtype)


@cache
def masked(shift: int = 0) -> Planned:
    """Several sums of what is computed of a sum under a mask, which is of some rows further on."""

    def step(w: Any, batch: Any) -> Any:
        x, u, p, q = batch
        x = x[shift:]
        y = jnp.where(x + u > 0, jnp.sinh(p) + q, 0)
        return w, (jnp.sum(y * p, axis=0), jnp.sum(y + q, axis=1), jnp.sum(y), jnp.sum(y - q, 0))

    return planned(step, *arrays((8,)), arrays((LONG + shift, LONG), *[(LONG, LONG)] * 3))


@cache
def pooled() -> Planned:
    """A step with the largest of windows, of what a relu is computed of."""

    def loss(ws: Any, x: Any) -> jax.Array:
        h = jax.nn.relu(normed(convolved(x, ws[0])))
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.mean(convolved(h, ws[1]).astype(jnp.float32) ** 2)

    return updated(loss, *[(3, 3, WIDTH, WIDTH)] * 2)


@cache
def added(taps: int) -> Planned:
    """A step with convolutions of which each adds what it reads."""

    def loss(ws: Any, h: Any) -> jax.Array:
        for w in ws:
            h = h + convolved(h, w)
        return jnp.mean(jnp.tanh(h).astype(jnp.float32) ** 2)

    return updated(loss, *[(taps, taps, WIDTH, WIDTH)] * 3)


def stored(found: Planned) -> Stored:
    (program,) = found.program.parts
    sizes = Sizes(program.part.graph, found.plan.mesh, "gpu")
    given = sizes.inputs(program.listing)
    return stored_kernels(program.listing.block, sizes, given, lambda *_: 0)


def peak_by_xla(found: Planned) -> int:
    (program,) = programs_of(found, H100, Target.of(H100))
    export: Any = program.export
    return compile_ahead(export()).peak_bytes


@pytest.mark.parametrize(("shift", "written"), [(0, 1), (1, 2)])
def test_what_is_read_by_one_that_is_stored_is_computed_in_that(shift: int, written: int) -> None:
    """The mask was stored for all that is computed of it, but those load what is under the mask.

    What is computed of items of another place stays.
    """
    kernels = stored(masked(shift))
    large = [n for k in kernels.kernels for n in k.makes if kernels.nbytes[n] >= LONG**2]
    assert [kernels.nbytes[n] for n in large] == [2 * LONG**2] * written


@needs_gpu_compiler
def test_so_it_is_by_xla() -> None:
    assert masked().plan.prediction.peak_bytes == pytest.approx(peak_by_xla(masked()), rel=0.001)


def test_the_gradient_of_a_pool_is_scattered_into_zeros_at_places_that_are_found_before() -> None:
    kernels = stored(pooled())
    (zeros,) = (k for k in kernels.kernels if k.at == FILL)
    (begun,) = (k for k in kernels.kernels if k.makes[0].endswith("begun"))
    (found,) = (k for k in kernels.kernels if "found" in k.makes[0])
    (scatter,) = (k for k in kernels.kernels if k.reads.issuperset(found.makes))
    assert begun.reads == {*zeros.makes}
    assert scatter.reads.issuperset(begun.makes)
    assert [kernels.nbytes[n] for n in found.makes] == [4 * IMAGE_BYTES // 2 // 4] * 4
    assert sum(zeros.makes[0] in k.reads for k in kernels.kernels) == 1 + 1 + 3


@needs_gpu_compiler
def test_and_so_it_is_by_xla() -> None:
    """But for 16 MiB which the order of the kernels decides."""
    told, compiled = pooled().plan.prediction.peak_bytes, peak_by_xla(pooled())
    assert abs(told - compiled) < 17 * 2**20


@needs_gpu_compiler
def test_a_loop_reads_an_argument_with_other_dims_where_it_lies() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def trip(total: jax.Array, rows: jax.Array) -> Any:
            return total + jnp.tanh(rows @ w).sum(0), None

        return w, jax.lax.scan(trip, jnp.zeros_like(w[0]), x.reshape(4, LONG, LONG))[0]

    found = planned(step, *arrays((LONG, LONG), (LONG, 4, LONG)))
    assert found.plan.prediction.peak_bytes == pytest.approx(peak_by_xla(found), rel=0.02)


@pytest.mark.parametrize(("taps", "sums"), [(1, 1), (3, 3)])
def test_a_convolution_adds_what_its_result_alone_is_added_to(taps: int, sums: int) -> None:
    """But for the gradient of an input, which reads a filter of several taps turned round."""
    (program,) = added(taps).program.parts
    steps = (k.instruction(program.listing.block) for k in stored(added(taps)).kernels)
    kinds = [program.part.graph.op_at(s.equation).kind for s in steps if isinstance(s, LocalOp)]
    assert kinds.count("add_any") == sums
    assert kinds.count("conv_general_dilated") == 3 + 3 + 2


@needs_gpu_compiler
@pytest.mark.parametrize("taps", [1, 3])
def test_and_so_by_xla(taps: int) -> None:
    assert added(taps).plan.prediction.peak_bytes == pytest.approx(
        peak_by_xla(added(taps)), rel=0.02
    )


@cache
def attended(rows: int, heads_inside: bool) -> Planned:
    """A step with what heads attend to, one beside the other, in products with what they share."""

    def step(w: Any, batch: Any) -> Any:
        weights, values = batch
        order = "btch" if heads_inside else "bthc"
        h = jnp.einsum(f"bhts,bhsc->{order}", weights, values).reshape(rows, SEQUENCE, -1)
        return w, jnp.mean((h @ w).astype(jnp.float32))

    weights = (rows, HEADS, SEQUENCE, SEQUENCE)
    return planned(
        step, *arrays((HEADS * DEPTH, 64)), arrays(weights, (rows, HEADS, SEQUENCE, DEPTH))
    )


@pytest.mark.parametrize(
    ("rows", "heads_inside", "written"), [(1, False, 1), (1, True, 2), (2, False, 2)]
)
def test_one_batch_of_a_product_may_be_written_between_its_rows(
    rows: int, heads_inside: bool, written: int
) -> None:
    """As it is read then, but for batches innermost, or those of two dims."""
    kernels = stored(attended(rows, heads_inside))
    nbytes = 2 * rows * SEQUENCE * HEADS * DEPTH
    assert [kernels.nbytes[n] for k in kernels.kernels for n in k.makes].count(nbytes) == written


@needs_gpu_compiler
@pytest.mark.parametrize(("rows", "heads_inside"), [(1, False), (1, True), (2, False)])
def test_so_it_is_written_by_xla(rows: int, heads_inside: bool) -> None:
    """But for 4 MiB in which BLAS may work."""
    found = attended(rows, heads_inside)
    compiled = peak_by_xla(found)
    assert found.plan.prediction.peak_bytes == pytest.approx(compiled, abs=5 * 2**20)
