"""What the parts of stages hold beside their arguments, as planned and as compilers lay it out."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster.target import Target
from autopar.cost.timeline import timed_listing
from autopar.ir.program import Part, PartKind
from autopar.planner.planned import Planned
from autopar.planner.stage_programs import PartCost, cost_part
from autopar.runtime.aot.launch import compile_ahead
from autopar.runtime.validation.steps import CpuProgram
from autopar.verifying.programs import programs_of
from benchmarks import models
from tests.planner.layers import arguments, train_step
from tests.runtime.aot_programs import needs_gpu_compiler

# A GPT whose layers are wide enough that alignment does not count.
LAYERS, WIDTH, HEADS, WORDS, TIME = 2, 1024, 8, 8192, 512
WORKSPACE_BYTES = 2**22  # of a product by cuBLAS


@cache
def planned_for(cluster: str) -> Planned:
    dtype = "float32" if cluster.endswith("cpu") else "float16"  # which CPUs widen
    create, step, batch = models.gpt(
        LAYERS, WIDTH, HEADS, WORDS, TIME, 32, dtype=dtype, optimizer="sgd"
    )
    parallel = autopar.parallelize(
        step, cluster=cluster, stages=2, microbatches=4, schedule="1f1b", method="megatron",
        cache=False,
    )  # fmt: skip
    return parallel.planned(jax.eval_shape(create, jax.random.key(0)), batch)


def costs_of(planned: Planned, kind: PartKind) -> list[tuple[Part, PartCost]]:
    """The parts of a kind with their costs, the first stage's first."""
    placed, shardings = planned.programs.placed, planned.programs.shardings
    found = [
        (
            made.part,
            cost_part(
                made.part, shardings[made.part.submesh],
                placed.contexts[made.part.submesh].tables, made.listing,
            ),
        )
        for made in planned.program.parts
        if made.part.kind is kind
    ]  # fmt: skip
    return sorted(found, key=lambda pair: pair[0].stage)


def test_what_a_forward_part_keeps_is_counted_once() -> None:
    """With the microbatches in flight, of which its own is one."""
    planned = planned_for("8xv100")
    for (part, cost), stage in zip(
        costs_of(planned, PartKind.FORWARD), planned.programs.costs, strict=True
    ):
        assert cost.working_bytes > stage.activation_bytes, part.name
        assert stage.working_bytes < stage.activation_bytes, part.name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("cluster", "beside"), [("2xh100", 0), ("2xcpu", 1)])
def test_gradients_are_added_to_their_sums_in_place(cluster: str, beside: int, dtype: Any) -> None:
    """Beside the sums, in f32, lies no gradient, but on a CPU one at a time, as wide as its sum."""
    step = autopar.parallelize(train_step, cluster=cluster, stages=2, microbatches=4, cache=False)
    planned = step.planned(*arguments(layers=4, width=512, rows=16, dtype=dtype))
    for part, cost in costs_of(planned, PartKind.BACKWARD):
        values = part.graph.nested_values
        assert [a.dtype or values[a.value].dtype for a in part.accumulators] == ["f32", "f32"]
        assert beside * 2**20 <= cost.working_bytes < (beside + 0.1) * 2**20, part.name


@pytest.mark.parametrize(("dtype", "moved"), [(jnp.float32, 1), (jnp.bfloat16, 1.5)])
def test_adding_to_sums_takes_time(dtype: Any, moved: float) -> None:
    """The product loads the sum and stores that in place of its own result, which nobody turns."""
    step = autopar.parallelize(train_step, cluster="2xh100", stages=2, microbatches=4, cache=False)
    planned = step.planned(*arguments(layers=4, width=512, rows=16, dtype=dtype))
    sum_bytes, product_bytes = 2**20, 512 * 512 * jnp.dtype(dtype).itemsize
    for made in planned.program.parts:
        if made.part.kind is not PartKind.BACKWARD:
            continue
        prices = planned.programs.placed.contexts[made.part.submesh].tables.prices
        alone, adding = (
            timed_listing(made.part.graph, made.listing, prices, None, sums).seconds.total
            for sums in ((), made.part.accumulators)
        )
        assert 2 * sum_bytes - product_bytes == moved * sum_bytes
        more = prices.elementwise(int(moved * sum_bytes)) - prices.cluster.chip.launch_seconds
        turned = prices.elementwise(2 * product_bytes)
        assert adding - alone == pytest.approx(2 * (more - turned))


@needs_gpu_compiler
@pytest.mark.parametrize("cluster", ["2xv100", "2xh100"])
def test_a_gpu_compiler_stores_no_gradient_beside_its_wider_sum(cluster: str) -> None:
    """Neither where products that read the same could be merged, nor where they are turned over."""
    step = autopar.parallelize(three_products, cluster=cluster, microbatches=4, cache=False)
    weights, batch = arguments(layers=3, width=2048, rows=256, dtype=jnp.float16)
    whole = autopar.Cluster.parse(cluster)
    programs = programs_of(step.planned(weights, batch), whole, Target.of(whole))
    (backward,) = (p for p in programs if p.name == "B0")
    export: Any = backward.export
    compiled = compile_ahead(export())
    assert compiled.peak_bytes - compiled.argument_bytes < 1.2 * WORKSPACE_BYTES
    assert backward.peak_bytes == pytest.approx(compiled.peak_bytes, abs=1.2 * WORKSPACE_BYTES)


def three_products(weights: list[jax.Array], batch: jax.Array) -> Any:
    """A step whose products read one value, as those of queries, keys and values do."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        query, key, value = (batch @ w for w in weights)
        return jnp.mean((jnp.tanh(query) * jnp.tanh(key) * value) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


def convolved(weight: jax.Array, batch: jax.Array) -> Any:
    """A step of one convolution."""

    def loss(weight: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(batch, weight, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.mean(jnp.tanh(made) ** 2)

    return weight - 0.1 * jax.grad(loss)(weight), ()


def backward_of_a_convolution(cluster: str) -> tuple[Planned, Part, PartCost]:
    """The only backward part of the step on one device; its sum takes 36 MiB, its gradient 18."""
    step = autopar.parallelize(convolved, cluster=cluster, microbatches=4, cache=False)
    weight = jax.ShapeDtypeStruct((3, 3, 1024, 1024), jnp.float16)
    planned = step.planned(weight, jax.ShapeDtypeStruct((16, 4, 4, 1024), jnp.float16))
    ((part, cost),) = costs_of(planned, PartKind.BACKWARD)
    return planned, part, cost


@pytest.mark.parametrize(("cluster", "beside"), [("1xv100", 18 + 18), ("1xcpu", 18)])
def test_what_a_convolution_adds_is_turned_over_before(cluster: str, beside: int) -> None:
    """On GPUs: XLA would add it up in a buffer of its own, as large as the sum."""
    _, part, cost = backward_of_a_convolution(cluster)
    assert [a.dtype for a in part.accumulators] == ["f32"]
    assert cost.working_bytes == pytest.approx(beside * 2**20, rel=0.06)


@needs_gpu_compiler
def test_a_gpu_compiler_turns_over_what_a_convolution_adds() -> None:
    planned, _, cost = backward_of_a_convolution("1xv100")
    whole = autopar.Cluster.parse("1xv100")
    (backward,) = (p for p in programs_of(planned, whole, Target.of(whole)) if p.name == "B0")
    export: Any = backward.export
    compiled = compile_ahead(export())
    held = compiled.peak_bytes - compiled.argument_bytes
    assert cost.working_bytes == pytest.approx(held, rel=0.1)


def chained(weights: list[jax.Array], batch: jax.Array) -> Any:
    """A step of convolutions one after the other."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        x, dims = batch, ("NHWC", "HWIO", "NHWC")
        for w in weights:
            made = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
            x = jnp.tanh(made)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), ()


@needs_gpu_compiler
def test_gradients_of_convolutions_are_added_up_where_the_sums_lie() -> None:
    """Else XLA adds them all up in the end: 27 MiB of three, beside a sum of 18."""
    step = autopar.parallelize(
        chained, cluster="2xv100", mesh="2", method="dp", microbatches=4, cache=False
    )
    shapes = [(3, 3, 512, 1024), (1, 1, 1024, 512)] * 3
    weights = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    planned = step.planned(weights, jax.ShapeDtypeStruct((64, 8, 8, 512), jnp.float16))
    whole = autopar.Cluster.parse("2xv100")
    (backward,) = (p for p in programs_of(planned, whole, Target.of(whole)) if p.name == "B0")
    export: Any = backward.export
    compiled = compile_ahead(export())
    assert compiled.peak_bytes - compiled.argument_bytes < 40 * 2**20
    assert backward.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)


def ratios(cluster: str) -> dict[str, float]:
    """Planned over compiled peak of every part of the loop."""
    planned = planned_for(cluster)
    whole = autopar.Cluster.parse(cluster)
    found = dict[str, float]()
    for program in programs_of(planned, whole, Target.of(whole)):
        if not program.name.startswith(("F", "B")):
            continue
        export: Any = program.export
        is_cpu = isinstance(export, CpuProgram)
        compiled = export.compiled() if is_cpu else compile_ahead(export())
        assert program.argument_bytes == pytest.approx(compiled.argument_bytes, rel=1e-3)
        found[program.name] = program.peak_bytes / compiled.peak_bytes
    return found


def check(found: dict[str, float], least: float, most: float) -> None:
    """What a forward part lays out is its results above all, of which some reuse others' place."""
    assert set(found) == {"F0", "F1", "B0", "B1"}
    assert all(least < found[name] < most for name in ("B0", "B1")), found
    assert all(least - 0.1 < found[name] < most + 0.1 for name in ("F0", "F1")), found


@needs_gpu_compiler
@pytest.mark.parametrize("cluster", ["8xv100", "8xh100"])
def test_parts_hold_what_a_gpu_compiler_lays_out(cluster: str) -> None:
    check(ratios(cluster), 0.9, 1.15)


@needs_gpu_compiler
def test_a_gpu_compiler_holds_no_more_for_layers_side_by_side_than_is_told() -> None:
    """Scores that a backward part computes again, of all its layers before it needs the first's."""
    create, step, batch = models.llama(
        4, 1024, 16, 2, 2048, 4096, sequence=8192, batch=8, optimizer="sgd"
    )
    parallel = autopar.parallelize(
        step, cluster="8xh100", stages=2, microbatches=8, schedule="1f1b", memory_gb=4.2,
        cache=False,
    )  # fmt: skip
    planned = parallel.planned(jax.eval_shape(create, jax.random.key(0)), batch)
    assert {s.remat.value for s in planned.plan.stages} == {"selective"}
    whole = autopar.Cluster.parse("8xh100")
    backward = [p for p in programs_of(planned, whole, Target.of(whole)) if p.name[0] == "B"]
    assert len(backward) == 2
    for program in backward:
        export: Any = program.export
        assert compile_ahead(export()).peak_bytes < 1.01 * program.peak_bytes


@pytest.mark.ci
def test_parts_hold_what_the_cpu_compiler_lays_out() -> None:
    check(ratios("4xcpu"), 0.8, 1.3)


def narrowed(weight: jax.Array, batch: jax.Array) -> Any:
    """A step of one convolution, whose filter is larger than its images, which it halves."""
    dims = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(batch, weight, (2, 2), "SAME", dimension_numbers=dims)
    return weight, jnp.mean(jnp.tanh(made) ** 2)


@needs_gpu_compiler
def test_a_gpu_compiler_lays_filters_out_anew_and_pads_images() -> None:
    """Beside the filter, of 18 MiB, and 8 of images."""
    step = autopar.parallelize(narrowed, cluster="1xh100", cache=False)
    weight = jax.ShapeDtypeStruct((3, 3, 1024, 1024), jnp.bfloat16)
    planned = step.planned(weight, jax.ShapeDtypeStruct((4, 32, 32, 1024), jnp.bfloat16))
    whole = autopar.Cluster.parse("1xh100")
    (program,) = programs_of(planned, whole, Target.of(whole))
    export: Any = program.export
    compiled = compile_ahead(export())
    assert compiled.peak_bytes > (18 + 8 + 18 + 8) * 2**20
    assert program.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)
