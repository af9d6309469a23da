"""The options that are chosen for a program: by its platform and by what its loops send."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from autopar.ir.compiler_options import LATENCY_HIDING, PIPELINED
from benchmarks.models import gpt


def options(is_scan: bool, cluster: str, layers: int = 4, **more: Any) -> dict[str, Any]:
    model = gpt(layers, 1024, 8, 4096, 256, 32, scan=is_scan, remat=True)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    given = {"cluster": cluster, "mesh": 8, "method": "fsdp", **more}
    return dict(autopar.plan(model.step, state, model.example_batch, **given).compiler_options)


def test_a_scan_on_gpus_pipelines_what_its_loops_send() -> None:
    kinds = ("all-gather", "reduce-scatter")
    wanted = dict.fromkeys((LATENCY_HIDING, *(PIPELINED[k] for k in kinds)), True)
    assert options(True, "8xh100") == wanted


def test_a_step_without_loops_pipelines_nothing() -> None:
    assert options(False, "8xh100") == {LATENCY_HIDING: True}


@pytest.mark.parametrize("cluster", ["8xcpu", "v5e:2x4"])
def test_other_platforms_get_no_options(cluster: str) -> None:
    assert options(True, cluster) == {}
    assert options(True, cluster, compiler_options={"xla_a": 1}) == {"xla_a": 1}


def test_what_is_asked_for_comes_over_what_is_chosen() -> None:
    asked = {PIPELINED["all-gather"]: False, "xla_gpu_autotune_level": 0}
    found = options(True, "8xh100", compiler_options=asked)
    assert found == {LATENCY_HIDING: True, PIPELINED["reduce-scatter"]: True, **asked}
    assert list(found) == sorted(found)
