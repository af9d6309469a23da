"""Products of rows that come in groups: XLA for GPUs multiplies all rows by what each group has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.cost.prices import elementwise_seconds, kernel_seconds, product_seconds
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import programs_of
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
    """Rows with zeros for those of other groups are written out, turned over, and multiplied."""
    by_groups = 2 * GROUPS * ROWS * TERMS
    nbytes = by_groups + 2 * (GROUPS * TERMS * COLUMNS + ROWS * COLUMNS)
    product = product_seconds(H100.chip, (1, ROWS, COLUMNS, GROUPS * TERMS), nbytes, "bf16")
    copies = 2 * elementwise_seconds(H100.chip, 2 * by_groups)
    found = planned(forward).plan.prediction.seconds
    assert found == pytest.approx(product + copies, rel=1e-6)


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
