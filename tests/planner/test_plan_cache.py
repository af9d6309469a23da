"""The plan cache: what was planned is found again, what cannot be used is refused and replaced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError
from autopar.ir.plan_file import plan_to_json
from autopar.planner import plan_cache
from autopar.planner.plan import plan_step
from autopar.planner.plan_cache import PlanCache

W, X = jnp.ones((64, 64)), jnp.ones((16, 64))


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda v: jnp.mean(jnp.tanh(x @ v) ** 2))(w)


def planned(folder: Path | None, x: Any = X, **options: Any) -> str:
    """The plan as its file has it."""
    given: dict[str, Any] = {"cluster": "8xcpu", "mesh_axes": 1, "cache": folder or False}
    return plan_to_json(autopar.plan(step, W, x, **{**given, **options}))


@pytest.fixture(scope="module", name="fresh")
def _fresh() -> str:
    return planned(None)


@pytest.fixture(name="solved")
def _solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were planned with a search, as they come."""
    found: list[str] = []
    real = plan_step

    def counted(source: Any, *rest: Any) -> Any:
        found.append(source.traced.name)
        return real(source, *rest)

    monkeypatch.setattr("autopar.step.plan_step", counted)
    return found


def test_a_plan_from_the_cache_is_the_same_byte_for_byte(
    tmp_path: Path, fresh: str, solved: list[str]
) -> None:
    folder = tmp_path / "plans"
    assert planned(folder) == planned(folder) == fresh
    assert solved == ["step"]
    (entry,) = PlanCache(folder).entries()
    assert entry.path.read_text() == fresh


def test_a_step_that_was_found_runs_and_can_be_asked(tmp_path: Path) -> None:
    planned(tmp_path, mesh=8)
    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=8, cache=tmp_path)
    assert jnp.allclose(parallel(W, X), step(W, X), atol=1e-6)
    assert autopar.partition_spec(parallel.what_if(pins={"w": ("data",)}).arguments[0]) == P("data")


def test_another_step_option_or_planner_has_a_plan_of_its_own(
    tmp_path: Path, solved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(tmp_path)
    planned(tmp_path, jnp.ones((32, 64)))
    planned(tmp_path, pins={"w": ("data",)})
    planned(tmp_path, remat=False)
    monkeypatch.setattr(plan_cache, "_code_hash", lambda: "a planner that was changed")
    planned(tmp_path)
    assert len(solved) == len(PlanCache(tmp_path).entries()) == 5


@pytest.mark.parametrize("fault", ["cut short", "no plan", "of another step"])
def test_an_entry_that_cannot_be_used_is_told_of_and_replaced(
    tmp_path: Path, fresh: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    planned(tmp_path)
    (entry,) = PlanCache(tmp_path).entries()
    other = planned(None, jnp.ones((8, 64)))
    text = {"cut short": fresh[:-9], "no plan": "hello", "of another step": other}[fault]
    entry.path.write_text(text)
    with caplog.at_level(logging.WARNING, "autopar"):
        assert planned(tmp_path) == fresh
    assert "an entry that cannot be used" in caplog.text
    assert entry.path.read_text() == fresh


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, fresh: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert planned(tmp_path / "file") == fresh
    assert "the plan cache cannot keep" in caplog.text


def test_clearing_leaves_what_is_not_its_own(tmp_path: Path, fresh: str) -> None:
    planned(tmp_path)
    (tmp_path / "plan.json").write_text(fresh)
    assert PlanCache(tmp_path).clear() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_it_is_beside_the_programs_that_jax_keeps(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        autopar.plan(step, W, X, cluster="8xcpu", mesh=8)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert len(PlanCache(tmp_path / "autopar-plans").entries()) == 1
    with pytest.raises(ArgumentError, match="cache is 3; it takes a folder or False"):
        autopar.parallelize(step, cluster="8xcpu", cache=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
