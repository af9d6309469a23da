"""Plans as JSON: round trips, checks, and what a damaged file is told."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InputError, PlanFileError
from autopar.ir.plan_file import plan_from_json, plan_to_json


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda v: jnp.mean(jnp.tanh(x @ v) ** 2))(w)


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    shaped = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return autopar.plan(step, shaped, shaped, cluster="8xcpu", mesh=(2, 4), pins={"w": ("model",)})


def rewritten(text: str, change: Callable[[dict[str, Any]], None]) -> str:
    """The text with a change and a checksum that agrees with it."""
    body = json.loads(text)
    del body["checksum"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode())
    return json.dumps({"checksum": digest.hexdigest(), **body})


@pytest.mark.smoke
def test_a_plan_comes_back_as_it_was(plan: autopar.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    assert plan_to_json(plan_from_json(plan_to_json(plan))) == plan_to_json(plan)


def test_the_peak_and_the_price_of_memory_are_kept(plan: autopar.Plan) -> None:
    outcome = replace(plan.outcome, memory_price_seconds_per_byte=1.5e-12)
    priced = replace(plan, outcome=outcome)
    back = plan_from_json(plan_to_json(priced))
    assert back.outcome.memory_price_seconds_per_byte == 1.5e-12
    peak = back.prediction.peak
    assert peak == plan.prediction.peak
    assert peak is not None
    assert sum(nbytes for _, nbytes in peak.totals) == plan.prediction.peak_bytes
    assert peak.items[0].local_bytes == max(i.local_bytes for i in peak.items)


def test_the_recipes_come_back_too(plan: autopar.Plan) -> None:
    recipes = plan_from_json(plan_to_json(plan)).outcome.recipes
    assert recipes == plan.outcome.recipes
    assert {m.name for m in recipes} >= {"dp", "fsdp", "megatron"}
    assert any(m.seconds is None and m.note for m in recipes)


def test_flops_of_large_models_come_back(plan: autopar.Plan) -> None:
    """A step of LLaMA-405B has more than 64 bits count."""
    assert plan.record is not None
    graph, count = re.subn(r"flops=\d+", "flops=11011828854502195200", plan.record.graph)
    prediction = replace(plan.prediction, model_flops=1.1e19)
    large = replace(plan, prediction=prediction, record=replace(plan.record, graph=graph))
    assert count
    assert plan_from_json(plan_to_json(large)) == large


def test_compiler_options_come_back_and_are_checked(plan: autopar.Plan) -> None:
    options = (("xla_a", True), ("xla_b", 3), ("xla_c", "dce,fusion"))
    text = plan_to_json(replace(plan, compiler_options=options))
    back = plan_from_json(text).compiler_options
    assert back == options
    assert [type(value) for _, value in back] == [bool, int, str]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"a": 1}, "compiler option 'a' is no option of XLA"),
        ({"xla_a": 1.5}, "expected true, false, a whole number or a text"),
        ({"xla_b": 1, "xla_a": 1}, "not in the order of their names"),
        ({"xla_dump_to": "/tmp/x"}, "a text is of letters"),
        ({"xla_dump_to": "x"}, "xla_dump_to names a file"),
    ]
    for given, told in wrong:
        with pytest.raises(PlanFileError, match=told):
            plan_from_json(rewritten(text, lambda body, g=given: body.update(compiler_options=g)))  # type: ignore[misc]


def test_a_field_that_is_missing_is_named(plan: autopar.Plan) -> None:
    def forget(body: dict[str, Any]) -> None:
        del body["prediction"]["peak"]

    with pytest.raises(PlanFileError, match="prediction: expected an object with 'peak'"):
        plan_from_json(rewritten(plan_to_json(plan), forget))


def test_a_truncated_file_is_no_json(plan: autopar.Plan) -> None:
    with pytest.raises(PlanFileError, match="is no JSON"):
        plan_from_json(plan_to_json(plan)[:-40])


def test_a_flipped_byte_breaks_the_checksum(plan: autopar.Plan) -> None:
    with pytest.raises(PlanFileError, match="do not match its checksum"):
        plan_from_json(plan_to_json(plan).replace('"model"', '"modem"', 1))


def test_another_format_is_named(plan: autopar.Plan) -> None:
    text = rewritten(plan_to_json(plan), lambda body: body.update(format=99))
    with pytest.raises(PlanFileError, match="plan format 99, but this autopar reads 9"):
        plan_from_json(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("submeshes", 3), ("arguments", [["data", "two"]]), ("prediction", {}), ("shardings", [[1]])],
)
def test_wrong_contents_are_damage_not_a_traceback(
    plan: autopar.Plan, key: str, value: Any
) -> None:
    text = rewritten(plan_to_json(plan), lambda body: body.update({key: value}))
    with pytest.raises(PlanFileError, match="is damaged"):
        plan_from_json(text)


def test_another_files_json_is_no_plan() -> None:
    with pytest.raises(PlanFileError, match="no autopar plan"):
        plan_from_json("[1, 2]")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read plan"):
        autopar.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file(plan: autopar.Plan, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    plan.save(target)
    before = target.read_bytes()
    with pytest.raises(InputError, match="there is no folder"):
        plan.save(tmp_path / "no such folder" / "plan.json")
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_may_be_read_by_whoever_the_user_lets(plan: autopar.Plan, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    plan.save(tmp_path / "plan.json")
    modes = [(tmp_path / name).stat().st_mode for name in ("other", "plan.json")]
    assert modes[0] == modes[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "plan.json"]
