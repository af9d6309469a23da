"""Plans that a compiler confirms to fit: what does not is planned again within less."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.api import Planned
from autopar.errors import MemoryLimitError, PlanError, VerifyError
from autopar.ir.compiled import CheckLevel, Compiled
from autopar.runtime.aot.program import AotProgram
from autopar.verifying.confirmed_fit import Trial, confirm_fit
from autopar.verifying.shrink import Called
from autopar.verifying.verify import Inquiry
from tests.runtime.aot_programs import needs_gpu_compiler
from tests.verifying.asking import answering, asked, train_step

# A state that a plan may hold whole on each device, or cut up.
WIDE = (
    {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    },
    jax.ShapeDtypeStruct((8192, 1024), jnp.float32),
)


@pytest.fixture
def roomy() -> Planned:
    """The plan of the step with all of a device's memory."""
    return autopar.parallelize(train_step, cluster="8xh100", mesh=(8,)).planned(*WIDE)


def answers(monkeypatch: pytest.MonkeyPatch, peaks: list[int]) -> None:
    """Let the compiler find these peaks, one after the other."""
    left: Iterator[int] = iter(peaks)

    def compile(
        export: Callable[[], AotProgram], level: CheckLevel, limit_seconds: float
    ) -> Compiled:
        del export
        assert level is CheckLevel.MEMORY
        assert limit_seconds == 7.0
        return Compiled("told", "none", 0, next(left), ())

    monkeypatch.setattr("autopar.step.Inquiry", partial(Inquiry, compile=compile))


def gib(nbytes: float) -> float:
    return nbytes / 2**30


def test_a_plan_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch, roomy: Planned) -> None:
    peak = roomy.plan.prediction.peak_bytes
    step = autopar.parallelize(train_step, cluster="8xh100", mesh=(8,), memory_gb=gib(peak + 8))
    before = step.planned(*WIDE)
    answers(monkeypatch, [peak + 8])
    found = step.confirm_fit(*WIDE, limit_seconds=7.0)
    assert found.planned is before
    assert found.trials == (Trial(peak + 8, peak, peak + 8, before.plan.prediction.seconds),)
    assert step.plan is found.plan


def test_what_does_not_fit_is_planned_again_within_less(
    monkeypatch: pytest.MonkeyPatch, roomy: Planned
) -> None:
    peak = roomy.plan.prediction.peak_bytes
    budget, compiled = peak + 8, round(peak * 1.1)
    step = autopar.parallelize(train_step, cluster="8xh100", mesh=(8,), memory_gb=gib(budget))
    before = step.plan_for(*WIDE)
    answers(monkeypatch, [compiled, budget])
    found = step.confirm_fit(*WIDE, limit_seconds=7.0)
    first, last = found.trials
    assert (first.limit_bytes, first.predicted_bytes, first.compiled_bytes) == (
        budget, peak, compiled,
    )  # fmt: skip
    # What would just fit if the compiler were as far off again.
    assert last.limit_bytes == budget * peak // compiled
    assert last.predicted_bytes <= last.limit_bytes < first.predicted_bytes
    assert last.compiled_bytes == budget
    assert found.plan != before
    assert found.plan.prediction.peak_bytes == last.predicted_bytes
    # The step runs by it, and a plan within the same limit is the same plan.
    assert step.plan is found.plan
    assert step.plan_for(*WIDE) is found.plan
    again = autopar.parallelize(
        train_step, cluster="8xh100", mesh=(8,), memory_gb=gib(last.limit_bytes)
    )
    assert again.plan_for(*WIDE) == found.plan
    lines = str(found).splitlines()
    assert lines[0].split() == ["within", "planned", "compiled", "step"]
    assert len(lines) == 3


def test_a_step_that_fits_nowhere_is_refused_with_its_trials(
    monkeypatch: pytest.MonkeyPatch, roomy: Planned
) -> None:
    peak = roomy.plan.prediction.peak_bytes
    step = autopar.parallelize(train_step, cluster="8xh100", mesh=(8,), memory_gb=gib(peak))
    answers(monkeypatch, [10 * peak])
    with pytest.raises(MemoryLimitError) as error:
        step.confirm_fit(*WIDE, limit_seconds=7.0)
    told = str(error.value)
    assert "no plan was found that the compiler lays out within" in told
    assert "compiled it holds" in told
    assert "no plan on (data=8) fits" in told  # why there is no other one


def test_plans_are_made_again_a_few_times_at_most(roomy: Planned) -> None:
    peak = roomy.plan.prediction.peak_bytes
    planned = replace(roomy, request=replace(roomy.request, memory_bytes=peak))
    limits: list[int] = []

    def plan_within(limit_bytes: int) -> Planned:
        limits.append(limit_bytes)
        return replace(roomy, request=replace(roomy.request, memory_bytes=limit_bytes))

    too_much = answering(Compiled("told", "none", 0, 2 * peak, ()))
    called = Called(planned.source.spec, WIDE, {})
    with pytest.raises(MemoryLimitError, match="no plan was found that the compiler") as error:
        confirm_fit(planned, too_much, called, plan_within)
    assert limits == [peak // 2] * 3
    assert str(error.value).count("compiled it holds") == 4


def test_where_there_is_no_plan_within_so_little_one_between_is_tried(roomy: Planned) -> None:
    peak = roomy.plan.prediction.peak_bytes
    planned = replace(roomy, request=replace(roomy.request, memory_bytes=peak))
    limits: list[int] = []

    def plan_within(limit_bytes: int) -> Planned:
        limits.append(limit_bytes)
        if len(limits) < 2:
            raise MemoryLimitError("it needs more\nand why")
        made = replace(roomy.plan.prediction, peak_bytes=limit_bytes)
        plan = replace(roomy.plan, prediction=made)
        return replace(planned, plan=plan, request=replace(roomy.request, memory_bytes=limit_bytes))

    peaks = iter([2 * peak, peak])

    def compile(*_: object) -> Compiled:
        return Compiled("told", "none", 0, next(peaks), ())

    called = Called(planned.source.spec, WIDE, {})
    found = confirm_fit(planned, Inquiry(CheckLevel.MEMORY, compile=compile), called, plan_within)
    assert limits == [peak // 2, (peak // 2 + peak) // 2]
    assert [t.limit_bytes for t in found.trials] == [peak, limits[1]]


def test_of_stages_the_worst_part_counts() -> None:
    step = autopar.parallelize(
        train_step, cluster="8xh100", stages=2, microbatches=4, schedule="1f1b"
    )
    planned = step.planned(*WIDE)
    told = asked(planned, answering(Compiled("told", "none", 1 << 10, 1 << 30, ())), WIDE)
    peaks = [f for part in told.parts for f in part.figures if f.name == "peak"]
    least = min(f.predicted for f in peaks)
    trial = Trial.of(planned, told)
    assert trial.compiled_bytes == planned.plan.prediction.peak_bytes + (1 << 30) - least


def test_memory_of_cpus_is_not_confirmed() -> None:
    step = autopar.parallelize(train_step, cluster="8xcpu", mesh=(8,))
    with pytest.raises(VerifyError, match="cannot be confirmed: XLA for CPUs"):
        step.confirm_fit(*WIDE)


def test_a_given_plan_is_not_made_again(roomy: Planned) -> None:
    step = autopar.parallelize(train_step, cluster="8xh100", plan=roomy.plan)
    with pytest.raises(PlanError, match=r"a plan that was given.*verify\(\) tells"):
        step.confirm_fit(*WIDE)


@needs_gpu_compiler
def test_a_gpu_compiler_confirms(roomy: Planned) -> None:
    peak = roomy.plan.prediction.peak_bytes
    step = autopar.parallelize(train_step, cluster="8xh100", mesh=(8,), memory_gb=gib(peak))
    found = step.confirm_fit(*WIDE)
    assert found.trials[-1].compiled_bytes <= found.trials[0].limit_bytes
    (part,) = found.verification.parts
    assert part.compiled.peak_bytes == found.trials[-1].compiled_bytes
