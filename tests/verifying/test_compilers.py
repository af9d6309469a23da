"""Plans beside what a compiler made of them: what agrees, what differs, and by which rule."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.errors import ArgumentError, VerifyError
from autopar.ir.compiled import CheckLevel, Compiled, CompiledCollective
from autopar.ir.verification import CompiledPart, Figure, Verification
from autopar.verifying.verify import Inquiry
from tests.runtime.aot_programs import lacks, needs_gpu_compiler, needs_tpu_compiler
from tests.verifying.asking import SHAPES, answering, as_planned, asked, planned_for, train_step

H100_BYTES = autopar.Cluster.parse("8xh100").memory_bytes


def part_of(found: Verification) -> CompiledPart:
    (part,) = found.parts
    return part


def figure_of(found: Verification, name: str) -> Figure:
    return next(f for f in part_of(found).figures if f.name == name)


def answered(
    change: Callable[[Compiled], Compiled], level: CheckLevel = CheckLevel.MEMORY
) -> Verification:
    """What is found where a compiler answers otherwise than planned."""
    planned = planned_for("8xh100")
    return asked(planned, answering(change(as_planned(planned)), level))


def test_what_is_as_planned_agrees() -> None:
    found = answered(lambda c: c)
    assert found.agrees
    part = part_of(found)
    assert [f.name for f in part.figures] == [
        "all-reduce over data", "arguments", "peak", "all of it", "waiting for collectives",
    ]  # fmt: skip
    assert part.differences == ()
    assert {f.ratio for f in part.figures} <= {1.0, None}
    assert found.target == "h100 1x1x8"


def test_collectives_alone_at_their_level() -> None:
    found = answered(lambda c: replace(c, peak_bytes=2 * c.peak_bytes), CheckLevel.COLLECTIVES)
    assert found.agrees
    assert [f.name for f in part_of(found).figures] == ["all-reduce over data"]


def scaled(compiled: Compiled, factor: float) -> Compiled:
    more = (replace(c, nbytes=round(c.nbytes * factor)) for c in compiled.collectives)
    return replace(compiled, collectives=tuple(more))


@pytest.mark.parametrize(
    ("factor", "agrees"), [(1.04, True), (0.96, True), (1.06, False), (0.94, False)]
)
def test_bytes_of_collectives_may_be_off_by_a_twentieth(factor: float, agrees: bool) -> None:
    found = answered(lambda c: scaled(c, factor))
    assert found.agrees is agrees
    assert figure_of(found, "all-reduce over data").agrees is agrees


def test_a_collective_that_was_added_is_named() -> None:
    extra = CompiledCollective(
        "all-gather", ("data",), "f32", 4096, 3, "jvp()/dot_general", "model.py:7"
    )
    found = answered(lambda c: replace(c, collectives=(*c.collectives, extra)))
    assert not found.agrees
    row = figure_of(found, "all-gather over data")
    assert (row.predicted, row.compiled, row.agrees) == (0, 12288, False)
    (told,) = part_of(found).differences
    assert "not planned" in told
    assert "model.py:7" in told


def test_of_groups_that_are_no_axes_the_sum_is_compared() -> None:
    def regrouped(compiled: Compiled) -> Compiled:
        first, *rest = compiled.collectives
        return replace(compiled, collectives=(replace(first, axes=()), *rest))

    found = answered(regrouped)
    assert found.agrees
    assert figure_of(found, "all-reduce").ratio == 1.0


GIB = 2**30


@pytest.mark.parametrize(
    ("predicted", "compiled", "agrees", "negligible"),
    [
        (30 * GIB, 30.5 * GIB, True, False),
        (30 * GIB, 31 * GIB, False, False),
        (40 * GIB, 20 * GIB, True, False),  # told, but no plan of it fails
        (1000, 5000, True, True),
        (0.93 * GIB, 1 * GIB, True, True),
        (0.9 * GIB, 1 * GIB, False, False),
    ],
)
def test_a_peak_may_be_predicted_higher_but_hardly_lower(
    predicted: float, compiled: float, agrees: bool, negligible: bool
) -> None:
    planned = planned_for("8xh100")
    prediction = replace(planned.plan.prediction, peak_bytes=int(predicted))
    planned = replace(planned, plan=replace(planned.plan, prediction=prediction))
    found = asked(planned, answering(replace(as_planned(planned), peak_bytes=int(compiled))))
    row = figure_of(found, "peak")
    assert (row.agrees, row.negligible) == (agrees, negligible)
    assert found.agrees is agrees


def test_what_does_not_fit_differs() -> None:
    found = answered(lambda c: replace(c, peak_bytes=H100_BYTES + 1))
    assert not part_of(found).fits
    full = answered(
        lambda c: replace(c, collectives=(), argument_bytes=0, out_of_memory="Ran out of memory")
    )
    assert not full.agrees
    assert [f.name for f in part_of(full).figures][:1] == ["peak"]  # no collectives were told


def test_seconds_decide_nothing() -> None:
    found = answered(lambda c: replace(c, seconds=100.0, exposed_seconds=99.0))
    assert found.agrees
    assert figure_of(found, "all of it").agrees is None


def test_stages_are_compiled_part_by_part() -> None:
    step = autopar.parallelize(
        train_step, cluster="8xh100", stages=2, microbatches=4, schedule="1f1b"
    )
    planned = step.planned(*SHAPES)
    answer = Compiled("told", "none", 1 << 10, 1 << 20, ())
    found = asked(planned, answering(answer))
    names = [p.name for p in found.parts]
    assert {"F0", "B0", "F1", "B1"} <= {*names, *(n for p in found.parts for n in p.alike)}
    assert len(set(names)) == len(names)


def test_another_target_has_as_many_devices() -> None:
    planned = planned_for("8xcpu")
    inquiry = answering(as_planned(planned))
    other = replace(inquiry, target=autopar.Cluster.parse("8xh200"))
    assert asked(planned, other).target == "h200 1x1x8"
    few = replace(inquiry, target=autopar.Cluster.parse("4xh200"))
    with pytest.raises(ArgumentError, match="has 4 devices and the plan is for 8"):
        asked(planned, few)


@pytest.mark.parametrize("method", ["dp", "zero2", "fsdp", "megatron"])
def test_cpu_devices_compile_what_was_planned(method: str) -> None:
    found = asked(planned_for("8xcpu", method), Inquiry(CheckLevel.MEMORY))
    assert found.agrees, str(found)
    assert any(f.kind for f in part_of(found).figures)
    assert figure_of(found, "arguments").ratio == 1.0
    assert "XLA on CPU" in found.notes[0]


def test_stages_compile_for_cpu_devices() -> None:
    step = autopar.parallelize(
        train_step, cluster="8xcpu", stages=2, microbatches=4, schedule="1f1b", method="dp"
    )
    found = step.verify(*SHAPES, level="collectives")
    assert found.agrees, str(found)
    assert len(found.parts) > 1


@needs_gpu_compiler
@pytest.mark.parametrize("method", ["fsdp"])
def test_a_gpu_compiler_makes_what_was_planned(method: str) -> None:
    found: Any = asked(planned_for("8xh100", method), Inquiry(CheckLevel.MEMORY))
    assert all(f.agrees for f in part_of(found).figures if f.kind), str(found)
    assert figure_of(found, "arguments").ratio == 1.0


@needs_tpu_compiler
def test_a_tpu_compiler_makes_what_was_planned() -> None:
    found = asked(planned_for("v5e:2x4", "megatron"), Inquiry(CheckLevel.MEMORY))
    assert all(f.agrees for f in part_of(found).figures if f.kind), str(found)


@pytest.mark.skipif(not lacks("gpu"), reason="the GPU compiler is installed")
def test_a_missing_compiler_is_named_with_its_command() -> None:
    with pytest.raises(VerifyError, match=r'pip install "autopar\[aot-gpu\]"'):
        asked(planned_for("8xh100"), Inquiry(CheckLevel.MEMORY))
