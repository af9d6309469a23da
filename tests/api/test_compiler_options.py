"""Compiler options from the user's call to the compiler: recorded, kept, used, told of."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError

W, X = jnp.full((64, 64), 0.01), jnp.ones((16, 64))
# What it switches off can be seen in the compiled text.
NO_FUSION: dict[str, bool | int | str] = {"xla_disable_hlo_passes": "fusion"}
_FUSED = "kind=kLoop"
WAYS: list[dict[str, Any]] = [
    {"mesh": "8", "method": "dp"},
    {"stages": 2, "microbatches": 2},
    {"passes": "batch=exact,layer=min-cut,stage=search{stages=2,microbatches=2},lower=spmd"},
]


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    return jax.tree.map(lambda v, g: v - 0.1 * g, w, jax.grad(loss)(w))


def state() -> dict[str, jax.Array]:
    return {"a": W, "b": W}


def has_fusions(way: dict[str, Any], options: dict[str, Any] | None) -> bool:
    run = autopar.parallelize(step, cluster="8xcpu", **way, compiler_options=options, donate=False)
    compiled = run.compile(state(), X)
    programs = compiled.values() if isinstance(compiled, dict) else [compiled]
    return any(_FUSED in program.as_text() for program in programs)


@pytest.mark.parametrize("way", WAYS, ids=["one", "mpmd", "spmd"])
def test_every_program_of_a_step_is_compiled_with_them(way: dict[str, Any]) -> None:
    assert has_fusions(way, None)
    assert not has_fusions(way, NO_FUSION)


def test_a_lowered_step_has_them_too() -> None:
    run = autopar.parallelize(step, cluster="8xcpu", mesh="8", compiler_options=NO_FUSION)
    assert _FUSED not in run.lower(state(), X).compile().as_text()


@pytest.mark.parametrize("way", WAYS, ids=["one", "mpmd", "spmd"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"xla_cpu_no_such_thing": 1}, "No such compile option: 'xla_cpu_no_such_thing'"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "'maybe' is not a valid bool value"),
    ],
)
def test_what_xla_does_not_know_is_refused_by_name(
    way: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    run = autopar.parallelize(step, cluster="8xcpu", **way, compiler_options=options)
    with pytest.raises(ArgumentError, match=told):
        run(state(), X)


def test_a_saved_plan_keeps_them_and_more_are_put_over_them(tmp_path: Path) -> None:
    options = {**NO_FUSION, "xla_cpu_enable_fast_math": True}
    plan = autopar.plan(step, state(), X, cluster="8xcpu", mesh="8", compiler_options=options)
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(step, plan=tmp_path / "plan.json")
    assert again.plan_for(state(), X) == plan
    assert _FUSED not in again.compile(state(), X).as_text()
    other = autopar.parallelize(step, plan=plan, compiler_options={"xla_disable_hlo_passes": ""})
    assert dict(other.plan_for(state(), X).compiler_options) == {
        "xla_cpu_enable_fast_math": True,
        "xla_disable_hlo_passes": "",
    }
    assert _FUSED in other.compile(state(), X).as_text()


def test_cpu_devices_get_no_options_for_gpus(caplog: pytest.LogCaptureFixture) -> None:
    plan = autopar.plan(step, state(), X, cluster="8xcpu", mesh="8", method="dp")
    of_gpus = replace(plan, compiler_options=(("xla_gpu_no_such_thing", True),))
    with caplog.at_level(logging.INFO, "autopar"):
        made = autopar.parallelize(step, plan=of_gpus, donate=False)(state(), X)
    assert "the compiler for CPU is not given no_such_thing" in caplog.text
    np.testing.assert_allclose(made["a"], step(state(), X)["a"], atol=1e-6)


def test_numbers_of_a_plan_for_gpus_are_compared_without_them() -> None:
    run = autopar.parallelize(step, cluster="8xh100", mesh="8", method="dp")
    assert dict(run.plan_for(state(), X).compiler_options)
    found = run.verify(state(), X, level="numerics")
    assert found.agrees
    assert any(
        "CPU is not given" in note and "latency_hiding_scheduler" in note for note in found.notes
    )


def test_what_is_asked_for_makes_another_plan_in_the_cache(tmp_path: Path) -> None:
    for options in ({}, NO_FUSION, NO_FUSION):
        plan = autopar.plan(
            step, state(), X, cluster="8xcpu", mesh="8", cache=tmp_path, compiler_options=options
        )
        assert dict(plan.compiler_options) == options
    assert len(list(tmp_path.glob("*.json"))) == 2
