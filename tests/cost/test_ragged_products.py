"""Products of rows that come in groups: XLA for GPUs multiplies all rows by what each group has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.cost.line import read_line
from autopar.cost.memory import step_kernels
from autopar.cost.prices import Prices, elementwise_seconds, kernel_seconds, product_seconds
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import timed_listing
from autopar.cost.trips import light_kernels
from autopar.ir.listing import LocalOp
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
from tests.cost.test_memory import ONE
from tests.runtime.aot_programs import needs_gpu_compiler

GROUPS, ROWS, TERMS, COLUMNS = 8, 4096, 512, 1024
H100 = Cluster.parse("1xh100")


def forward(weight: Any, batch: Any) -> Any:
    return weight, jax.lax.ragged_dot(batch["rows"], weight, batch["sizes"])


def trained(weight: Any, batch: Any) -> Any:
    def loss(weight: Any) -> jax.Array:
        return jnp.mean(forward(weight, batch)[1].astype(jnp.float32) ** 2)

    return weight - 0.1 * jax.grad(loss)(weight), ()


def planned(step: Any, cluster: str = "1xh100") -> Planned:
    weight = jax.ShapeDtypeStruct((GROUPS, TERMS, COLUMNS), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((ROWS, TERMS), jnp.bfloat16)
    batch = {"rows": rows, "sizes": jax.ShapeDtypeStruct((GROUPS,), jnp.int32)}
    return autopar.parallelize(step, cluster=cluster, cache=False).planned(weight, batch)


def test_a_gpu_multiplies_all_rows_by_each_group() -> None:
    """Rows with zeros for those of other groups are written out and multiplied."""
    by_groups = 2 * GROUPS * ROWS * TERMS
    nbytes = by_groups + 2 * (GROUPS * TERMS * COLUMNS + ROWS * COLUMNS)
    product = product_seconds(H100.chip, (1, ROWS, COLUMNS, GROUPS * TERMS), nbytes, "bf16")
    copy = elementwise_seconds(H100.chip, 2 * by_groups)
    found = planned(forward).plan.prediction.seconds
    assert found == pytest.approx(product + copy, rel=1e-6)


def as_run(step: Any, *args: Any) -> list[tuple[tuple[str, ...], set[str]]]:
    """The copies of rows by groups that each kernel makes and reads, as a GPU runs them."""
    (made,) = autopar.parallelize(step, cluster="1xh100", cache=False).planned(*args).program.parts
    graph, block = made.part.graph, made.listing.block
    prices = Prices(H100, ONE)
    sizes = Sizes(graph, ONE, "gpu")
    found = step_kernels(
        graph, made.listing, sizes, timed_listing(graph, made.listing, prices, sizes)
    )
    kernels = found.joined(block, found.stored).kernels
    grouped = read_line(block, sizes).grouped
    rows = ((tuple(n for n in k.makes if n in grouped), k.reads & grouped.keys()) for k in kernels)
    return [(made, {*reads}) for made, reads in rows if made or reads]


def test_a_ragged_product_is_no_light_work() -> None:
    """So no gather of a loop is taken to the trip before with one that leads to it."""
    (made,) = planned(forward).program.parts
    sizes = Sizes(made.part.graph, ONE, "gpu")
    timed = timed_listing(made.part.graph, made.listing, Prices(H100, ONE), sizes)
    light = light_kernels(timed.block, timed.kernels, sizes)
    kinds = [
        sizes.op(step.equation).kind if isinstance(step, LocalOp) else ""
        for step in (kernel.instruction(timed.block) for kernel in timed.kernels)
    ]
    assert "ragged_dot_general" in kinds
    assert light == [kind != "ragged_dot_general" for kind in kinds]


def test_gradients_of_groups_take_both_sides_by_groups() -> None:
    """The copy that a product wants turned over is turned over from theirs."""
    weight = jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    batch = {"rows": rows, "sizes": jax.ShapeDtypeStruct((2,), jnp.int32)}
    found = as_run(trained, weight, batch)
    (whole,), _ = found[0]
    (by_terms,), _ = found[1]
    (other,), _ = found[3]
    assert found == [
        ((whole,), set()), ((by_terms,), {whole}), ((), {by_terms}),
        ((other,), set()), ((), {whole, other}),
    ]  # fmt: skip


def test_copies_of_the_same_groups_run_as_one() -> None:
    """So all that the gradients of what the groups have read is there at once."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> jax.Array:
            one, other = (jax.lax.ragged_dot(batch["rows"], w, batch["sizes"]) for w in weights)
            return jnp.mean(one * other)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights)), ()

    weight = jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    batch = {"rows": rows, "sizes": jax.ShapeDtypeStruct((4,), jnp.int32)}
    found = as_run(step, (weight, weight), batch)
    assert [len(made) for made, _ in found] == [1, 1, 0, 0, 2, 0, 0]
    (whole,), gradients = found[0][0], found[4][0]
    assert [reads for _, reads in found[-2:]] == [{whole, gradient} for gradient in gradients]


@pytest.mark.parametrize(("cluster", "times"), [("1xh100", GROUPS), ("v5e:2x2", 1), ("1xcpu", 1)])
def test_others_multiply_each_row_once(cluster: str, times: int) -> None:
    chip = Cluster.parse(cluster).chip
    (op,) = (
        o
        for o in planned(forward).program.parts[0].part.graph.ops
        if o.kind == "ragged_dot_general"
    )
    once = kernel_seconds(chip, op, 0) - chip.launch_seconds
    half = chip.half_flops / (chip.compute_efficiency * chip.flops_for("bf16"))
    alone = op.flops / (chip.compute_efficiency * chip.flops_for("bf16"))
    assert once == pytest.approx(times * alone + half)


@needs_gpu_compiler
def test_xla_holds_the_rows_of_all_groups() -> None:
    (program,) = programs_of(planned(trained), H100, Target.of(H100))
    export: Any = program.export
    compiled = compile_ahead(export())
    held = compiled.peak_bytes - compiled.argument_bytes
    assert held > 3 * 2 * GROUPS * ROWS * TERMS
    assert program.peak_bytes - compiled.argument_bytes == pytest.approx(held, rel=0.1)
