"""Questions about a plan through the front door, and how their answers print."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from tests.zoo import cases

CASE = cases("sgd")["mlp"]
ARGS = (jax.eval_shape(CASE.create_state, jax.random.key(0)), CASE.batch(0))


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.plan(CASE.step, *ARGS, cluster="8xcpu", mesh=(2, 4), method="megatron")


def largest(plan: autopar.Plan) -> str:
    state = [a for a in plan.arguments if a.role == "state"]
    return max(state, key=lambda a: a.shape).path


def test_an_explanation_prints(plan: autopar.Plan) -> None:
    found = autopar.explain(plan, largest(plan))
    first, *rest = str(found).splitlines()
    assert first.startswith(f"{largest(plan)} is sharded as {found.choice}: ")
    assert "a step" in first
    assert sum(" instead: " in line for line in rest) == len(found.alternatives) > 0


def test_a_pin_has_a_price_and_prints(plan: autopar.Plan) -> None:
    found = autopar.why_not(plan, {largest(plan): P()})
    assert found.pinned is not None
    lines = str(found).splitlines()
    assert lines[0].startswith("as planned: ")
    assert lines[1].startswith(f"with {largest(plan)} = P()")
    assert any(f"{largest(plan)}: " in line for line in lines[2:])


def test_plans_are_compared(plan: autopar.Plan) -> None:
    other = autopar.plan(CASE.step, *ARGS, cluster="8xcpu", mesh=(2, 4), method="dp")
    assert str(autopar.compare(plan, plan)) == "step: the plans are equal"
    told = str(autopar.compare(plan, other))
    assert "method: megatron -> dp" in told
    assert f"{largest(plan)}: P(" in told


def test_a_step_is_linted() -> None:
    odd = jax.ShapeDtypeStruct((1009, 7), jnp.float32)
    found = autopar.lint(lambda w, x: w - x.sum() * w, odd, odd, cluster="8xcpu")
    assert "1009" in str(found)


def test_a_step_is_a_card_in_a_notebook(plan: autopar.Plan) -> None:
    assert autopar.parallelize(CASE.step)._repr_html_() == "<pre>step: no plan yet</pre>"
    step = autopar.parallelize(CASE.step, cluster="8xcpu", plan=plan)
    assert "autopar-card" in step._repr_html_()


def test_a_plan_is_text_in_a_notebook_and_a_page(plan: autopar.Plan, tmp_path: Path) -> None:
    assert plan._repr_html_().startswith("<pre>plan step on 8xcpu")
    autopar.write_report(plan, tmp_path / "plan.html", against={"same": plan})
    assert "same" in (tmp_path / "plan.html").read_text(encoding="ascii")
    with pytest.raises(autopar.errors.InputError, match="one program, which"):
        autopar.write_report(plan, tmp_path / "plan.html", trace=tmp_path / "t.json")


def test_what_a_plan_means_adds_up(plan: autopar.Plan) -> None:
    found = autopar.inspect(plan)
    exposed = sum(row.exposed_seconds for row in found.collectives)
    assert exposed == pytest.approx(plan.prediction.exposed_seconds)
