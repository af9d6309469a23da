"""Fewer stages than hosts lie over several hosts each, however slow the wires between these are."""

from __future__ import annotations

import pytest

import autopar
from tests.planner.layers import arguments, train_step

ROWS, WIDTH = 64, 64


@pytest.mark.parametrize(
    ("layers", "cluster", "stages", "schedule"),
    [(8, "4x1xcpu", 2, "1f1b"), (8, "4x2xcpu", 3, "1f1b"), (8, "8x1xcpu", 4, "zb-v")],
)
def test_stages_that_hosts_share(layers: int, cluster: str, stages: int, schedule: str) -> None:
    plan = autopar.plan(
        train_step, *arguments(layers, WIDTH, ROWS),
        cluster=cluster, stages=stages, microbatches=4, schedule=schedule,
    )  # fmt: skip
    sizes = [s.mesh.device_count for s in plan.submeshes]
    hosts, of_each = map(int, cluster.split("x")[:2])
    assert len(sizes) == stages
    assert sum(sizes) == hosts * of_each
    assert max(sizes) > of_each
