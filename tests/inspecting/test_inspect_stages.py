"""Stages read closely: each part once for every run, memory as the schedule has it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import pytest

import autopar
from autopar.inspecting.inspect import inspect
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.inspection import Inspection
from autopar.ir.peak import HeldKind
from autopar.ir.plan import Plan
from tests.zoo import cases

CASES = cases("adam")
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "method": "megatron"},
    "mlp": {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
    "masked": {"microbatches": 4},  # a count is hoisted
}


@functools.cache
def staged(name: str) -> tuple[Plan, Inspection]:
    case = CASES[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    plan = autopar.plan(case.step, state, case.batch(0), cluster="8xa100-40gb", **OPTIONS[name])
    return plan, inspect(reopen(plan))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_part_counts_as_often_as_it_runs(name: str) -> None:
    plan, found = staged(name)
    assert found.meshes == tuple(s.mesh for s in plan.submeshes)
    runs = plan.microbatches
    for number, stage in enumerate(plan.stages):
        own = [row for row in found.ops if row.spot.stage == number]
        waits = [row for row in found.collectives if row.spot.stage == number]
        busy = sum(r.seconds for r in own) + sum(r.exposed_seconds for r in waits)
        looped = stage.forward_seconds + stage.backward_seconds
        assert busy == pytest.approx(runs * looped + stage.once_seconds)
        assert {row.submesh for row in waits} <= {stage.submesh}
    assert set(found.modules[0].stages) == set(range(len(plan.stages)))
    assert found.spans == ()


@pytest.mark.parametrize("name", OPTIONS)
def test_memory_follows_the_schedule_up_to_the_peak(name: str) -> None:
    plan, found = staged(name)
    for number, curve in enumerate(found.memory):
        (stage, *_) = (s for s in plan.stages if s.submesh == number)
        top = curve.levels[curve.peak]
        assert top.nbytes == stage.peak_bytes
        assert all(nbytes > 0 for level in curve.levels for _, nbytes in level.by_kind)
        times = [level.seconds for level in curve.levels]
        assert times == sorted(times)
        assert times[-1] <= plan.prediction.seconds
        held = dict(curve.levels[-1].by_kind)
        state = [a for a in plan.arguments if a.role == "state" and a.submesh == number]
        mesh = plan.submeshes[number].mesh
        kinds = HeldKind.PARAMETER, HeldKind.OPTIMIZER
        assert sum(held.get(k, 0) for k in kinds) >= sum(a.local_bytes(mesh) for a in state)
    assert max(c.levels[c.peak].nbytes for c in found.memory) == plan.prediction.peak_bytes


def test_activations_come_and_go() -> None:
    plan, found = staged("gpt")
    flying = [
        [dict(level.by_kind).get(HeldKind.ACTIVATION, 0) // stage.activation_bytes
         for level in curve.levels]
        for stage, curve in zip(plan.stages, found.memory, strict=True)
    ]  # fmt: skip
    assert flying[0] == [1, 2, 2, 2, 2, 2, 2, 1, 0]  # F F B F B F B B, then the update
    assert flying[1] == [1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_what_is_cast_once_is_still_its_parameter() -> None:
    plan, found = staged("gpt")
    total = sum(
        4 * math.prod(a.shape) for a in plan.arguments if a.path.startswith("state/params/")
    )
    assert found.modules[0].parameter_bytes == total
    layers = [m for m in found.modules if m.path in ("Gpt/h0", "Gpt/h1")]
    assert [(m.count, m.stages) for m in layers] == [(1, (0,)), (1, (1,))]
    assert layers[0].parameter_bytes == layers[1].parameter_bytes > 0
