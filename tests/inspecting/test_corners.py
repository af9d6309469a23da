"""Counterexamples that once were: paths that end alike, odd names, steps that do nothing."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError
from autopar.exporting.python import python_module
from tests.exporting.running import loaded

ROWS = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def planned(step: Any, *args: Any, **options: Any) -> autopar.Plan:
    return autopar.plan(step, *args, cluster="8xcpu", **options)


def test_a_whole_path_means_itself_and_not_what_ends_in_it() -> None:
    def step(s: Any, b: Any) -> Any:
        return {"b": s["b"] - 0.1 * (b.T @ b)}

    plan = planned(step, {"b": ROWS}, ROWS, mesh=(8,), pins={"b": P("data"), "s/b": P()})
    lies = {a.path: a.sharding for a in plan.arguments}
    assert autopar.explain(plan, "b").subject == "b"
    assert autopar.explain(plan, "b").sharding == lies["b"]
    found = autopar.why_not(plan, {"b": P("data")})
    assert found.pinned is not None
    assert found.pinned.seconds == found.price.seconds
    assert not found.moved


def test_signs_in_names_are_only_signs(tmp_path: Path) -> None:
    def step(s: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w - 0.1 * (x.T @ x), s)

    names = {"w#": ROWS, "w1": ROWS, "<b>": ROWS, "\N{GRINNING FACE}": ROWS}
    plan = planned(step, names, ROWS)
    autopar.write_report(plan, tmp_path / "plan.html")
    assert "<b>." not in (tmp_path / "plan.html").read_text(encoding="ascii")
    assert autopar.explain(plan, "s/w#").subject == "s/w#"
    assert {a.path for a in plan.arguments} == set(loaded(python_module(plan), tmp_path).INPUTS)


def test_a_step_that_does_nothing_has_a_page(tmp_path: Path) -> None:
    plan = planned(lambda x: x, ROWS)
    autopar.write_report(plan, tmp_path / "plan.html")
    assert "</html>" in (tmp_path / "plan.html").read_text(encoding="ascii")


def test_what_no_stage_reads_cannot_be_pinned() -> None:
    def step(w: Any, unused: Any, x: Any) -> Any:
        del unused
        return w - 0.1 * jax.grad(lambda v: jnp.mean((x @ v) ** 2))(w)

    plan = planned(step, ROWS, ROWS, ROWS, microbatches=4)
    with pytest.raises(ArgumentError, match="no op of the step reads 'unused'"):
        autopar.why_not(plan, {"unused": P("data")})


def test_random_keys_go_through_an_exported_module(tmp_path: Path) -> None:
    def step(w: Any, key: Any) -> Any:
        return w + jax.random.normal(key, w.shape)

    plan = planned(step, ROWS, jax.random.key(0), mesh=(8,))
    exported = loaded(python_module(plan), tmp_path)
    given = (jnp.ones((64, 64)), jax.random.key(1))
    there = exported.parallelize(step, *given)(*given)
    assert jnp.allclose(there, step(*given), atol=1e-6)
