"""Ops that run once for each microbatch are priced as often, and what is in flight is held."""

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.errors import MemoryLimitError
from autopar.ir.graph import Graph
from autopar.ir.record import parse_graph
from autopar.ir.sharding import MeshShape
from autopar.passes.base import Holding, Setting
from autopar.passes.shard.optimal import Optimal
from autopar.rules import attach_rules

STEP = """
graph step(%x: f32[64,512] batch "x", %w: f32[512,512] state "w") {
  %y: f32[64,512] = dot_general(%x, %w) flops=33554432 {dimension_numbers=(((1,), (0,)), ((), ()))}
  %g: f32[512,512] = dot_general(%x, %y)
    backward flops=33554432 {dimension_numbers=(((0,), (0,)), ((), ()))}
  %n: f32[512,512] = sub(%w, %g) update flops=262144
  return %n "w" <- %w
}
"""


def step(runs: int) -> Graph:
    """The step whose forward and backward run for each of some microbatches."""
    graph = parse_graph(STEP)
    ops = [replace(op, runs=1 if op.kind == "sub" else runs) for op in graph.ops]
    return attach_rules(replace(graph, ops=tuple(ops)))


ROWS = (("x", (("data",), ())),)
SETTING = Setting(Cluster.parse("8xh100"), MeshShape.of((8,)), 2**60, pins=ROWS)


def test_runs_print_and_parse() -> None:
    graph = step(16)
    assert "runs=16" in str(graph)
    assert parse_graph(str(graph)).ops[0].runs == 16


def test_gradients_are_reduced_once_a_step() -> None:
    """Sixteen partial sums are added up before one reduction, so the gradient lies partial."""
    plan = Optimal().run(step(16), SETTING)
    assert plan.sharding_of["%g"].partial == ("data",)


def test_costs_grow_with_the_microbatches() -> None:
    """Work of the loop is done sixteen times, the update and the reduction once."""
    one, many = (Optimal().run(step(runs), SETTING).outcome.seconds for runs in (1, 16))
    assert one < many < 16 * one


def test_what_is_in_flight_is_held_as_often() -> None:
    """Four microbatches' activations take four times the room, which a limit then forbids."""
    graph = step(16)
    roomy = Optimal().run(graph, replace(SETTING, memory_bytes=500_000))
    assert roomy.outcome.seconds > 0
    flying = replace(SETTING, memory_bytes=500_000, held={"%y": Holding(64)})
    with pytest.raises(MemoryLimitError):
        Optimal().run(graph, flying)
