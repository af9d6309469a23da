"""The graph of a submesh is sharded once, and each part keeps to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.ir.batching import Accumulator, Batching, Rows
from autopar.ir.program import (
    Part,
    PartKind,
    PartProgram,
    Program,
    Run,
    Send,
    Start,
    SubmeshGraph,
)
from autopar.ir.record import parse_graph
from autopar.ir.sharding import Assignment, MeshShape, Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Layer, LayerSequence, Remat, Stage, StagePlan, Submesh
from autopar.passes.base import Setting
from autopar.passes.lower.partition.split import split
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan, submesh_graph
from autopar.passes.shard.optimal import Optimal
from autopar.rules import attach_rules
from tests.passes.loopback import lowered, whole_plan
from tests.passes.sketch import LOOP, ONCE, Sketch, with_stages
from tests.passes.steps import Chain, balanced, two_passes

PAIR = MeshShape.of(2)
CHAIN = Chain(layers=4, clip=True, tied=True, bias=True, skips=((1, 3),), width=4)


def _on_pairs(stages: StagePlan) -> StagePlan:
    pairs = tuple(Submesh(PAIR, (2 * k, 2 * k + 1)) for k in range(len(stages.submeshes)))
    return replace(stages, submeshes=pairs)


def _joints(
    batching: Batching, stages: StagePlan
) -> tuple[tuple[Part, ...], tuple[SubmeshGraph, ...]]:
    step = split(batching, stages)
    return step.parts, tuple(submesh_graph(step, u) for u in range(len(stages.submeshes)))


def _check_lies(program: Program) -> None:
    """Each register is read as it was written, and state comes back as it went in."""
    held: dict[tuple[int, int], Sharding] = {}
    for feed in program.feeds:
        held.update(((feed.submesh, r), feed.sharding) for r in feed.registers)
    for step in program.instructions:
        if isinstance(step, Send):
            for transfer in step.transfers:
                assert held[step.source, transfer.source] == transfer.before
                held[step.target, transfer.target] = transfer.after
        elif isinstance(step, Start):
            for register, sharding in zip(step.registers, step.shardings, strict=True):
                held[step.submesh, register] = sharding
        elif isinstance(step, Run):
            _check_run(program.parts[step.part], step, held)
    for fetch in program.fetches:
        assert all(held[fetch.submesh, r] == fetch.sharding for r in fetch.registers)
        assert not fetch.sharding.partial


def _check_run(given: PartProgram, run: Run, held: dict[tuple[int, int], Sharding]) -> None:
    submesh, listing = given.part.submesh, given.listing
    assert [held[submesh, r] for r in run.inputs] == list(listing.input_shardings)
    plain = len(run.outputs)
    for register, sharding in zip(run.outputs, listing.output_shardings, strict=False):
        held[submesh, register] = sharding
    summed = [held[submesh, r] for r in run.accumulators]
    assert summed == list(listing.output_shardings[plain:])


def _solved(joint: SubmeshGraph, mesh: MeshShape) -> ShardingPlan:
    cluster = Cluster.parse(f"{mesh.device_count}xcpu")
    return Optimal().run(joint.graph, Setting(cluster, mesh, int(1e12)))


CASES: dict[str, tuple[Sketch, Batching]] = {
    "chain": (CHAIN.sketch(), CHAIN.batching()),
    "two passes": (s := two_passes(), s.batching(3, 2, loops=2)),
    "balanced": (s := balanced(), s.batching(4, 2, loops=2, barrier=True)),
}


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("chain", "1f1b"), ("chain", "zb-h1"), ("two passes", "1f1b"), ("balanced", "gpipe")],
)
def test_a_solved_plan_lies_alike_on_both_sides_of_every_part(
    name: str, schedule: str, remat: Remat
) -> None:
    sketch, batching = CASES[name]
    plain = _on_pairs(sketch.staged(batching, (0, 2), schedule, 2))
    stages = with_stages(plain, remat=remat)
    _, joints = _joints(batching, stages)
    plans = tuple(_solved(joint, PAIR) for joint in joints)
    _, program = lowered(batching, stages, plans)
    _check_lies(program)
    fed = {(f.input, f.submesh): f.sharding for f in program.feeds}
    fetches = {f.output: f for f in program.fetches}
    for o, i in batching.graph.donated:
        assert fed.get((i, fetches[o].submesh), fetches[o].sharding) == fetches[o].sharding


def test_each_op_is_there_once_with_its_runs() -> None:
    batching = CHAIN.batching()
    stages = CHAIN.sketch().staged(batching, (0, 2), "zb-h1", 2)
    parts, joints = _joints(batching, stages)
    for joint in joints:
        assert len(set(joint.equations)) == len(joint.graph.ops)
        for equation, op in zip(joint.equations, joint.graph.ops, strict=True):
            mine = [p for p in parts if p.submesh == joint.submesh and equation in p.equations]
            looped = sum(p.kind not in (PartKind.SETUP, PartKind.UPDATE) for p in mine)
            assert op.runs == looped * batching.microbatches + len(mine) - looped


def test_what_waits_between_parts_is_stashed() -> None:
    batching = CHAIN.batching()
    stages = CHAIN.sketch().staged(batching, (0, 2), "1f1b", 2)
    parts, joints = _joints(batching, stages)
    forward, backward = (next(p for p in parts if p.name == name) for name in ("F1", "B1"))
    kept = {i.value.name for i in backward.graph.inputs}
    assert set(joints[1].stashed) == {
        name
        for name in kept
        if name in forward.graph.outputs or name in [i.value.name for i in forward.graph.inputs]
        if name not in [i.value.name for i in batching.graph.inputs]
    }


def test_a_gradient_stays_a_partial_sum_until_the_update() -> None:
    """The devices of a submesh combine gradients once a step, not once a microbatch."""
    chain = Chain(layers=4, tied=True)
    batching = chain.batching()
    stages = _on_pairs(chain.sketch().staged(batching, (0, 2), "1f1b", 2))
    parts, joints = _joints(batching, stages)
    plans = [_by_rows(joint, whole_plan(joint.graph, stages, u)) for u, joint in enumerate(joints)]
    _, program = lowered(batching, stages, plans)
    _check_lies(program)
    sums = {a.value for p in parts for a in p.accumulators}
    for given in program.parts:
        moved = {move.value.name for move, _ in given.listing.collectives()}
        if given.part.kind is PartKind.BACKWARD:
            lies = dict(zip(given.part.graph.outputs, given.listing.output_shardings, strict=True))
            assert {lies[a.value].partial for a in given.part.accumulators} == {("data",)}
            assert moved.isdisjoint(sums)
        if given.part.kind is PartKind.UPDATE and given.part.stage == 0:
            # The gradient that another submesh sent is whole already.
            assert len(moved & sums) == 2
    starts = [s for s in program.instructions if isinstance(s, Start)]
    assert ("data",) in {sharding.partial for s in starts for sharding in s.shardings}


def _by_rows(joint: SubmeshGraph, plan: ShardingPlan) -> ShardingPlan:
    """The plan in which products over the rows of the batch share them out."""
    values, assignments = dict(plan.values), list(plan.assignments)
    for j, op in enumerate(joint.graph.ops):
        numbers = dict(op.params).get("dimension_numbers")
        if numbers == (((0,), (0,)), ((), ())) and op.rule is not None:
            (shared,) = (f for f in op.rule.operands[0][0] if f in op.rule.operands[1][0])
            assignments.append(((j,), Assignment((shared,))))
            values[op.results[0].name] = Sharding(((), ()), ("data",))
    return replace(plan, values=tuple(values.items()), assignments=tuple(assignments))


def test_a_part_keeps_its_ops_paths() -> None:
    batching = CHAIN.batching()
    stages = _on_pairs(CHAIN.sketch().staged(batching, (0, 2), "zb-h1", 2))
    parts, joints = _joints(batching, stages)
    plans = [_solved(joint, PAIR) for joint in joints]
    for part in parts:
        joint, plan = joints[part.submesh], plans[part.submesh]
        mine = part_plan(part, joint, plan)
        mine.verify(part.graph)
        for (i,), given in mine.assignments:
            j = joint.equations.index(part.equations[i])
            assert plan.assignment_of[j,] == given
        assert left_partial(part, joint) >= {a.value for a in part.accumulators}


REMAT = """
graph remat(
  %w: f64[4,4]  state "w",
  %x: f64[2,4]  batch "x"
) {
  %h: f64[2,4] = checkpoint(%x, %w) forward {prevent_cse=True} [
    graph body(%a: f64[2,4], %b: f64[4,4]) {
      %c: f64[2,4] = dot_general(%a, %b) {dimension_numbers=(((1,), (0,)), ((), ()))}
      %d: f64[2,4] = tanh(%c)
      return %d
    }
  ]
  %e: f64[4,4] = dot_general(%h, %x) backward {dimension_numbers=(((0,), (0,)), ((), ()))}
  %n: f64[4,4] = sub(%w, %e) update
  return %n "w" <- %w
}
"""


def test_what_a_remat_gives_back_lies_as_in_its_body() -> None:
    graph = attach_rules(parse_graph(REMAT))
    batching = Batching(
        graph, 2, 4, (LOOP, LOOP, ONCE), (("%x", Rows(0)),), (Accumulator("%e", 0),)
    )
    layers = LayerSequence(graph, (Layer(0, 0, 0, 0),), (0, 0, 0), ((0,), (0,)))
    stages = StagePlan(layers, (Stage(0, 0),), (Submesh(PAIR, (0, 1)),), 2, "1f1b")
    _, (joint,) = _joints(batching, stages)
    plan = whole_plan(joint.graph, stages, 0)
    rows = {n: Sharding((("data",), ())) for n in ("%x", "%a", "%c", "%d")}
    values = {n: s for n, s in plan.values if n != "%h"} | rows
    sharded = replace(plan, values=tuple(values.items()))
    _, program = lowered(batching, stages, (sharded,))
    _check_lies(program)
    backward = next(p for p in program.parts if p.part.name == "B0")
    places = [i.value.name for i in backward.part.graph.inputs]
    assert str(backward.listing.input_shardings[places.index("%h")]) == "[data, -]"
