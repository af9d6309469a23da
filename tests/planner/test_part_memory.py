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
LAYERS, WIDTH, HEADS, WORDS, TIME = 2, 256, 4, 2048, 256


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


@pytest.mark.parametrize(("cluster", "beside"), [("2xh100", 0), ("2xcpu", 1)])
def test_gradients_are_added_to_their_sums_in_place(cluster: str, beside: int) -> None:
    """Beside the sums lies no gradient, but on a CPU one at a time: its products add nothing."""
    step = autopar.parallelize(train_step, cluster=cluster, stages=2, microbatches=4, cache=False)
    planned = step.planned(*arguments(layers=4, width=512, rows=16))
    for part, cost in costs_of(planned, PartKind.BACKWARD):
        sums = [part.graph.nested_values[a.value].nbytes for a in part.accumulators]
        assert sums == [2**20, 2**20]
        assert beside * 2**20 <= cost.working_bytes < (beside + 0.1) * 2**20, part.name


def test_a_product_is_stored_where_its_sum_is_wider() -> None:
    """A gradient in bf16 is added up in f32: no product adds to what is wider than it is."""
    step = autopar.parallelize(train_step, cluster="2xh100", stages=2, microbatches=4, cache=False)
    planned = step.planned(*arguments(layers=4, width=512, rows=16, dtype=jnp.bfloat16))
    for part, cost in costs_of(planned, PartKind.BACKWARD):
        sums = [part.graph.nested_values[a.value].nbytes for a in part.accumulators]
        assert sums == [2**19, 2**19]
        assert {a.dtype for a in part.accumulators} == {"f32"}
        assert 2**19 <= cost.working_bytes < 1.2 * 2**19, part.name


def test_adding_to_sums_takes_time() -> None:
    """A gradient in bf16 is loaded, and its f32 sum loaded and stored, where it was turned over."""
    step = autopar.parallelize(train_step, cluster="2xh100", stages=2, microbatches=4, cache=False)
    planned = step.planned(*arguments(layers=4, width=512, rows=16, dtype=jnp.bfloat16))
    for made in planned.program.parts:
        if made.part.kind is not PartKind.BACKWARD:
            continue
        prices = planned.programs.placed.contexts[made.part.submesh].tables.prices
        alone, adding = (
            timed_listing(made.part.graph, made.listing, prices, None, sums).seconds.total
            for sums in ((), made.part.accumulators)
        )
        turned, added = (prices.elementwise(n * 2**19) for n in (2, 1 + 4))
        assert adding - alone == pytest.approx(2 * (added - turned))


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
    check(ratios(cluster), 0.97, 1.15)


@pytest.mark.ci
def test_parts_hold_what_the_cpu_compiler_lays_out() -> None:
    check(ratios("4xcpu"), 0.8, 1.3)
