"""Forms that make values again, as the planner weighs them beside a step as it was written."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.ir.sharding_plan import Recomputation
from autopar.planner import best_mesh
from autopar.planner.memory_fit import MeshPlan, StepOnMesh, TriedMesh
from autopar.planner.remat import Form, LeanerForms, form_of
from autopar.rules import RuleBook
from benchmarks import models
from benchmarks.zoo.scanned_gpt import lora


def test_what_checkpoints_make_again_already_is_not_planned_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a scanned layer made again is the very step where `jax.checkpoint` is around it."""
    model = models.gpt(2, 32, 2, 64, 16, 8, scan=True, remat=True)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    cheapest = StepOnMesh.cheapest
    offered: list[tuple[Form, Form]] = []
    planned: list[Form] = []

    def noted_form(plain: Form, recomputed: Recomputation, rules: RuleBook) -> Form:
        form = form_of(plain, recomputed, rules)
        offered.append((plain, form))
        return form

    def noted_plan(step: StepOnMesh, memory_bytes: int) -> MeshPlan:
        planned.append(step.form)
        return cheapest(step, memory_bytes)

    monkeypatch.setattr("autopar.planner.memory_fit.form_of", noted_form)
    monkeypatch.setattr(StepOnMesh, "cheapest", noted_plan)
    autopar.plan(model.step, state, model.example_batch, cluster="8xh100", mesh=(2, 4))
    alike = [form for plain, form in offered if form.graph == plain.graph]
    assert alike
    assert not any(form is again for form in planned for again in alike)


class Noted(Exception):
    """What a test wants to know is known."""


def test_what_holds_little_holds_no_more_than_where_scans_keep_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No cut through the layers of this step leaves as little as `jax.checkpoint` around them."""
    model = models.gpt(12, 768, 12, 32768, 1024, 16, scan=True)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    found: list[LeanerForms] = []

    def noted(tried: TriedMesh, fastest: float) -> MeshPlan:
        found.append(tried.roomy.leaner_forms)
        raise Noted

    monkeypatch.setattr(best_mesh, "plan_on", noted)
    with pytest.raises(Noted):
        autopar.plan(model.step, state, model.example_batch, cluster="8xh100", mesh=8, memory_gb=4)
    (forms,) = found
    least, whole = forms.within(0), forms.checkpointed()
    assert least is not None
    assert whole is not None
    assert least.saved_bytes >= whole.saved_bytes


@pytest.mark.slow
def test_a_step_is_planned_within_less_than_its_plan_without_a_limit_holds() -> None:
    model = models.gpt(12, 768, 12, 32768, 1024, 16, scan=True)
    state = jax.eval_shape(model.create_state, jax.random.key(0))

    def planned(memory_gb: float | None = None) -> autopar.Plan:
        return autopar.plan(
            model.step, state, model.example_batch, cluster="8xh100", mesh=8, memory_gb=memory_gb
        )

    roomy = planned().prediction
    tight = planned(0.8 * roomy.peak_bytes / 2**30).prediction
    assert tight.peak_bytes <= 0.8 * roomy.peak_bytes
    assert tight.seconds < 1.05 * roomy.seconds


def test_a_tighter_limit_gives_no_faster_plan() -> None:
    """More is made again than saves time by the sum of all ops, where the step gets shorter."""
    model = lora(2, sequence=2048, batch=16)
    state = jax.eval_shape(model.create_state, jax.random.key(0))

    def planned(memory_gb: float | None = None) -> autopar.Plan:
        return autopar.plan(
            model.step, state, model.example_batch, cluster="8xh100", mesh=8, memory_gb=memory_gb
        )

    roomy = planned()
    tight = planned(0.98 * roomy.prediction.peak_bytes / 2**30)
    assert roomy.prediction.seconds < 1.01 * tight.prediction.seconds
