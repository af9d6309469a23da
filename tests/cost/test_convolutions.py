"""What XLA for GPUs writes out anew around convolutions."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cluster.chip import Platform
from autopar.cluster.target import Target
from autopar.cost.kernels import Kernel, Stored, stored_kernels
from autopar.cost.sizes import Sizes
from autopar.ir.listing import LocalOp
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
from tests.runtime.aot_programs import needs_gpu_compiler

FILTER = (3, 3, 64, 64)


def laid_out(planned: Planned, platform: Platform = "gpu") -> Stored:
    """The kernels of a step that is one program."""
    (part,) = planned.program.parts
    sizes = Sizes(planned.graph, planned.plan.mesh, platform)
    return stored_kernels(part.listing.block, sizes, sizes.inputs(part.listing), lambda *_: 0)


def stored(
    cluster: str, image: tuple[int, ...], taps: tuple[int, ...], stride: int,
    platform: Platform = "gpu", **asked: Any,
) -> Stored:  # fmt: skip
    """The kernels of a step that trains one filter."""

    def step(weight: jax.Array, batch: jax.Array) -> Any:
        def loss(weight: jax.Array) -> jax.Array:
            dims = ("NHWC", "HWIO", "NHWC")
            strides = (stride, stride)
            made = jax.lax.conv_general_dilated(
                batch, weight, strides, "SAME", dimension_numbers=dims
            )
            return jnp.mean(jnp.tanh(made) ** 2)

        return weight - 0.1 * jax.grad(loss)(weight), ()

    planned = autopar.parallelize(step, cluster=cluster, cache=False, **asked).planned(
        jax.ShapeDtypeStruct(taps, jnp.bfloat16), jax.ShapeDtypeStruct(image, jnp.bfloat16)
    )
    return laid_out(planned, platform)


def copies(found: Stored, word: str) -> list[tuple[Kernel, int]]:
    """The kernels that make a piece with such a word in its name, and its bytes."""
    return [(k, found.nbytes[k.makes[0]]) for k in found.kernels if word in k.makes[0]]


@pytest.mark.parametrize("batch", [1, 256])
def test_a_filter_is_laid_out_anew_however_small_the_images_are(batch: int) -> None:
    """It is but the filter: the gradient of what it made is slid, too, and read as it lies."""
    found = stored("1xh100", (batch, 8, 8, 64), FILTER, 1)
    ((_, nbytes),) = copies(found, "as filters")
    assert nbytes == 3 * 3 * 64 * 64 * 2


@pytest.mark.parametrize(
    ("stride", "platform", "written"), [(1, "gpu", 0), (2, "gpu", 1), (2, "tpu", 0)]
)
def test_an_image_that_is_padded_on_one_side_is_written_out_padded(
    stride: int, platform: Platform, written: int
) -> None:
    """Once: for the convolution and for the gradient of its filter."""
    found = copies(stored("1xh100", (4, 8, 8, 64), FILTER, stride, platform), "padded")
    assert [nbytes for _, nbytes in found] == written * [4 * 9 * 9 * 64 * 2]


def padded_gradient(groups: int, taps: int = 3) -> tuple[list[int], list[int]]:
    """Sizes of the copies in which inputs of convolutions lie apart, and of what these make.

    It is the gradient of an image of 8 by 8 by 64, of a convolution with strides of 2.
    """

    def step(weight: jax.Array, batch: jax.Array) -> Any:
        def loss(weight: jax.Array) -> jax.Array:
            made = jax.lax.conv_general_dilated(
                jnp.tanh(batch * weight[0, 0, 0]), weight, (2, 2), "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
            )  # fmt: skip
            return jnp.mean(jnp.tanh(made) ** 2)

        return weight - 0.1 * jax.grad(loss)(weight), ()

    planned = autopar.parallelize(step, cluster="1xh100", cache=False).planned(
        jax.ShapeDtypeStruct((taps, taps, 64 // groups, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 8, 8, 64), jnp.bfloat16),
    )
    found = laid_out(planned)
    made = [
        r for op in planned.graph.ops for r in op.results
        if op.kind == "conv_general_dilated" and max(op.ints("lhs_dilation")) > 1
    ]  # fmt: skip
    copies_apart = [n for name, n in found.nbytes.items() if name.endswith(":2")]
    return copies_apart, [found.nbytes[r.name] for r in made]


def test_the_gradient_of_a_padded_image_is_made_as_large_as_that() -> None:
    """cuDNN reads the inputs as they lie, and the gradient is cut out of what it makes."""
    assert padded_gradient(1) == ([], [4 * 9 * 9 * 64 * 2])
    assert padded_gradient(1, taps=1) == ([], [4 * 8 * 8 * 64 * 2])  # of no padding


def test_with_groups_of_features_inputs_are_written_out_apart() -> None:
    copied, made = padded_gradient(64)
    assert copied == [4 * 10 * 10 * 64 * 2]
    assert made == [4 * 8 * 8 * 64 * 2]


def dilated(apart: int, causal: bool = False) -> Planned:
    """A step of three convolutions whose filters have taps so far apart, of rows split by eight."""
    padding = [(2 * apart, 0)] * 2 if causal else "SAME"

    def loss(ws: Any, h: Any) -> jax.Array:
        h = jnp.sin(h)
        for w in ws:
            made = jax.lax.conv_general_dilated(
                h, w, (1, 1), padding, rhs_dilation=(apart, apart),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )  # fmt: skip
            h = jax.nn.relu(made)
        return jnp.sum(jnp.sin(h.astype(jnp.float32)))

    def step(ws: Any, x: Any) -> Any:
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x), strict=True)], ()

    bf16 = jnp.bfloat16
    ws = [jax.ShapeDtypeStruct(FILTER, bf16)] * 3
    images = jax.ShapeDtypeStruct((128, 64, 64, 64), bf16)
    planned = autopar.parallelize(step, cluster="8xh100", mesh=(8,), method="dp", cache=False)
    return planned.planned(ws, images)


@pytest.mark.parametrize(("apart", "count"), [(1, 0), (2, 6)])
def test_the_gradient_of_a_filter_with_taps_apart_has_features_for_rows(
    apart: int, count: int
) -> None:
    """cuDNN has no call for it: XLA slides what the filter made, of which it has a copy."""
    found = laid_out(dilated(apart))
    named = [m for k in found.kernels for m in k.makes if m.endswith("as features")]
    assert len(named) == count
    assert {found.nbytes[name] for name in named} <= {16 * 64**3 * 2}


def test_a_filter_with_taps_apart_is_filled_where_the_image_is_padded_on_one_side() -> None:
    found = laid_out(dilated(4, causal=True))
    filled = {n: size for n, size in found.nbytes.items() if n.endswith("apart")}
    assert len(filled) == 3 + 2  # and to the gradients of the inputs
    assert set(filled.values()) == {9 * 9 * 64 * 64 * 2}


def test_and_then_zeros_are_multiplied() -> None:
    even, filled = (dilated(4, causal).plan.prediction.seconds for causal in (False, True))
    assert filled > 1.5 * even


def test_the_gradient_of_an_image_padded_on_one_side_is_cut_out_of_a_larger_one() -> None:
    """As cuDNN's call for it pads evenly. What the filter made is not copied for that."""
    found = laid_out(dilated(1, causal=True))
    made = {n for k in found.kernels for n in k.makes}
    padded = [n for n in made if "padded by" in n]
    assert len(padded) == 3  # of the images, for the filters and their gradients
    cut = [n for n in made if found.nbytes[n] == 16 * 66 * 66 * 64 * 2 and n not in padded]
    assert len(cut) == 2


@needs_gpu_compiler
@pytest.mark.parametrize(("apart", "causal"), [(2, False), (1, True)])
def test_memory_of_taps_apart_is_as_compiled(apart: int, causal: bool) -> None:
    planned = dilated(apart, causal)
    cluster = Cluster.parse("8xh100")
    (program,) = programs_of(planned, cluster, Target.of(cluster))
    export: Any = program.export
    peak = compile_ahead(export()).peak_bytes
    assert planned.plan.prediction.peak_bytes == pytest.approx(peak, rel=0.02)


def transposed(turned: bool) -> Planned:
    """A step of two transposed convolutions, whose filters are turned round or are not."""

    def loss(ws: Any, h: Any) -> jax.Array:
        for w in ws:
            made = jax.lax.conv_transpose(h, w, (2, 2), "VALID", transpose_kernel=turned)
            h = jnp.maximum(made, 0)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)), ()

    taps = jax.ShapeDtypeStruct((2, 2, 64, 64), jnp.bfloat16)
    image = jax.ShapeDtypeStruct((64, 32, 32, 64), jnp.bfloat16)
    return autopar.parallelize(step, cluster="1xh100", cache=False).planned([taps] * 2, image)


# The images of either, as they are padded.
TRANSPOSED = {False: [2 * 64 - 1 + 2, 2 * 32 - 1 + 2], True: []}


@pytest.mark.parametrize(("turned", "sides"), TRANSPOSED.items())
def test_a_transposed_convolution_reads_inputs_that_are_written_out_apart(
    turned: bool, sides: list[int]
) -> None:
    """Unless it turns its filter round, as the gradient does that cuDNN has a call for.

    The gradients of the filters read all with the features outermost.
    """
    planned = transposed(turned)
    (part,) = planned.program.parts
    sizes = Sizes(planned.graph, planned.plan.mesh)
    block, given = part.listing.block, sizes.inputs(part.listing)
    found = stored_kernels(block, sizes, given, lambda *_: 0)
    padded = sorted(found.nbytes[n] for n in found.nbytes if "padded by" in n)
    assert padded == sorted(64 * side * side * 64 * 2 for side in sides)
    turned_over = sorted(found.nbytes[n] for n in found.nbytes if "as features" in n)
    assert turned_over == [64 * side * side * 64 * 2 for side in (32, 64, 64, 128)]


@needs_gpu_compiler
@pytest.mark.parametrize("turned", TRANSPOSED)
def test_so_it_does_by_xla(turned: bool) -> None:
    cluster = Cluster.parse("1xh100")
    (program,) = programs_of(transposed(turned), cluster, Target.of(cluster))
    export: Any = program.export
    # Where the update of a filter runs apart from what turns it, XLA lays out less than is told.
    most = 1.08 if turned else 1.01
    assert 0.99 < program.peak_bytes / compile_ahead(export()).peak_bytes < most


@pytest.mark.parametrize(("taps", "turned"), [((3, 3, 64, 33), 1), ((3, 3, 33, 64), 0)])
def test_the_gradient_of_a_filter_is_turned_over_before_another_dim_is_scattered(
    taps: tuple[int, ...], turned: int
) -> None:
    """It lies with what the filter makes outermost."""
    found = stored("2xh100", (4, 8, 8, taps[2]), taps, 1, method="fsdp")
    assert [nbytes for _, nbytes in copies(found, "turned for")] == turned * [3 * 3 * 64 * 33 * 2]
    scattered = [k for k in found.kernels if k.group is not None and k.group[0] == "reduce-scatter"]
    assert len(scattered) == 1
    assert all(scattered[0].reads == {*k.makes} for k, _ in copies(found, "turned for"))


@needs_gpu_compiler
def test_by_xla_an_update_runs_as_the_filter_lies() -> None:
    """It reads a gradient that was turned over, and writes the filter and its momentum in place."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        made = jax.lax.conv_general_dilated(
            x, w.astype(jnp.bfloat16), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jnp.tanh(made.astype(jnp.float32)) ** 2)

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        w, momentum = state
        value, grad = jax.value_and_grad(loss)(w, x)
        momentum = 0.9 * momentum + grad
        return (w - 0.1 * momentum, momentum), value

    taps = jax.ShapeDtypeStruct((3, 3, 64, 128), jnp.float32)
    image = jax.ShapeDtypeStruct((16, 32, 32, 64), jnp.bfloat16)
    planned = autopar.parallelize(step, cluster="1xh100", cache=False).planned((taps, taps), image)
    cluster = Cluster.parse("1xh100")
    (program,) = programs_of(planned, cluster, Target.of(cluster))
    export: Any = program.export
    hlo = compile_ahead(export()).hlo
    lines = [line for line in hlo.splitlines() if " = " in line]
    (update,) = (
        line
        for line in lines
        if re.search(r" = \((f32\[3,3,64,128\]\S*,? ?){2}\)", line) and " fusion(" in line
    )
    assert "kind=kLoop" in update
    assert not any(" copy(" in line and "[3,3,64,128]" in line for line in lines)


def test_a_convolution_over_no_places_is_planned_as_a_product_is() -> None:
    def step(weight: jax.Array, batch: jax.Array) -> jax.Array:
        def loss(weight: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.conv_general_dilated(batch, weight, (), []) ** 2)

        return weight - jax.grad(loss)(weight)

    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (1024, 512)))
    planned = autopar.parallelize(step, cluster="8xh100", cache=False).planned(*shapes)
    assert planned.plan.prediction.seconds > 0


@pytest.mark.parametrize("kept", [False, True])
def test_a_convolution_reads_the_bias_that_is_added_to_it(kept: bool) -> None:
    """cuDNN adds it, unless what it is added to is read elsewhere too."""

    def step(weights: Any, batch: jax.Array) -> Any:
        weight, bias = weights
        dims = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(batch, weight, (1, 1), "SAME", dimension_numbers=dims)
        other = jnp.sum(made) if kept else 0.0
        return weights, jnp.sum(jnp.exp(made + bias.reshape(1, 1, 1, -1)), (0, 1, 2)) + other

    weights = jax.ShapeDtypeStruct(FILTER, jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    images = jax.ShapeDtypeStruct((8, 8, 8, 64), jnp.bfloat16)
    planned = autopar.parallelize(step, cluster="1xh100", cache=False).planned(weights, images)
    (part,) = planned.program.parts
    found = laid_out(planned)
    bias = planned.graph.inputs[1].value.name
    steps = (k.instruction(part.listing.block) for k in found.kernels if bias in k.reads)
    kinds = {planned.graph.op_at(s.equation).kind for s in steps if isinstance(s, LocalOp)}
    assert kinds
    assert (kinds == {"conv_general_dilated"}) is not kept
