"""Stages that have nothing to run."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.timeline import Seconds
from autopar.ir.sharding import MeshShape
from autopar.ir.values import Role
from autopar.passes.base import Setting
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.request import Request
from autopar.planner.submesh_sharding import SubmeshSharder
from tests.passes.sketch import ONCE, Sketch, number


def test_a_stage_without_parts_costs_nothing() -> None:
    """All that its layer has is run once a step, by the first stage of its submesh."""
    s = Sketch()
    x = s.given("x", (2, 3), Role.BATCH, 0)
    w = s.given("w", (3,), Role.STATE, 2)
    y = s.op("tanh", x)
    s.layer = 1
    y = s.op("tanh", y)
    s.layer = 3
    s.returns(s.sums(s.total(y)))
    s.moment, s.region, s.layer = ONCE, "update", 2
    s.returns(s.op("mul", w, number(0.5)), w)
    batching = s.batching(2, 2)
    request = Request(Cluster.parse("2xcpu"))
    stages = s.staged(batching, (0, 1, 2, 3), "interleaved", 2)
    placed = PlacedStages.of(batching, stages, request.cluster)
    assert [bool(placed.parts_of(k)) for k in range(4)] == [True, True, False, True]
    setting = Setting(request.cluster, MeshShape((), ()), 2**60)
    full, empty = SubmeshSharder(placed, request, setting).shard(0, False).costs
    assert empty.of_step(2) == Seconds()
    assert (empty.fixed_bytes, empty.activation_bytes, empty.working_bytes) == (0, 0, 0)
    assert full.of_step(2) != Seconds()
