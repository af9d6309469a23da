"""The predicted step as a trace: its tracks, and spans that end where the prediction does."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.exporting.perfetto import perfetto_trace
from autopar.report.trace import read_trace


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) - x) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


def traced(**options: Any) -> tuple[autopar.Plan, dict[str, Any], str]:
    shape: Any = jax.ShapeDtypeStruct
    w = {n: shape((64, 64), jnp.float32) for n in "ab"}
    plan = autopar.plan(step, w, shape((128, 64), jnp.float32), cluster="8xh100", **options)
    text = perfetto_trace(plan)
    return plan, json.loads(text), text


def test_one_program_has_a_track_for_each_stream() -> None:
    plan, data, _ = traced(mesh=8, method="fsdp")
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    names = {e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"}
    assert names == {"work", "wires", "step on 8xh100, predicted"}
    assert max(e["ts"] + e["dur"] for e in spans) <= plan.prediction.seconds * 1e6 * 1.001
    assert any(e["args"]["line"].startswith("test_perfetto.py:") for e in spans)


def test_stages_have_a_track_for_each_submesh() -> None:
    plan, _, text = traced(stages=2, microbatches=4)
    spans = read_trace(text.replace('"args": {}', '"args": {"stage": 0, "microbatch": -1}'), "it")
    assert {s.submesh for s in spans} == {0, 1}
    assert sum(s.name.startswith("F") for s in spans) == 2 * plan.microbatches
    # The devices are done before the host, which has so many small programs to issue.
    assert 0 < max(s.end_seconds for s in spans) < plan.prediction.seconds
