"""The work of planning small steps, or of refusing them, counted and not timed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

import autopar
from autopar.cluster import Cluster
from autopar.errors import MemoryLimitError
from autopar.ir.graph import Graph
from autopar.ir.sharding import MeshShape
from autopar.passes.base import NO_LIMIT_BYTES, Setting
from autopar.passes.shard.model import assemble
from autopar.passes.shard.model import read as reading
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.model.merge_isomorphic import Merged
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.solver import solve as solving
from autopar.passes.shard.solver.branch_and_bound import Bounded, branch_and_bound
from autopar.passes.shard.solver.problem import Problem
from autopar.planner import best_mesh
from autopar.planner.memory_fit import MeshContext, StepOnMesh
from autopar.planner.remat import Form
from autopar.planner.request import Request
from benchmarks.bench_small_plans import CASES, mlp
from tests.passes.driving import traced

# A problem is some hundredth of a second to pose, and 5e7 numbers some second to look at: so both
# together are less than the five seconds of a core that a small step may take.
MOST_SOLVED, MOST_WORK = 120, 5e7


@dataclass
class Counted:
    """The problems that branch and bound was given, and the answers."""

    answers: list[Bounded] = field(default_factory=list[Bounded])

    @property
    def work(self) -> int:
        """Numbers looked at."""
        return sum(answer.work for answer in self.answers)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Generator[Counted]:
    found = Counted()

    def search(problem: Problem, labels: Sequence[int]) -> Bounded:
        found.answers.append(branch_and_bound(problem, labels=labels))
        return found.answers[-1]

    with monkeypatch.context() as patched:
        patched.setattr(solving, "branch_and_bound", search)
        yield found


@pytest.mark.parametrize("name", ["mlp2 2x8xh100/2 at 0.6", "mlp4-adam 8xcpu/2 at 0.6"])
def test_a_small_step_takes_little_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few problems are solved on the way to a plan or a refusal, and each to its proof."""
    case = CASES[name]
    step, args = case.build()
    roomy = autopar.plan(step, *args, **case.options)
    assert case.share is not None
    limit = case.share * roomy.prediction.peak_bytes / 2**30
    with counted(monkeypatch) as found:
        with suppress(MemoryLimitError):
            autopar.plan(step, *args, memory_gb=limit, **case.options)
    assert 0 < len(found.answers) <= MOST_SOLVED
    assert found.work <= MOST_WORK
    for answer in found.answers:
        assert answer.proven


def test_a_step_on_a_mesh_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and exposed moves are other problems of the same prices."""
    step, args = CASES["mlp2 8xcpu/2"].build()
    form = Form(None, traced(step, *args).graph)
    priced: list[object] = []
    price = assemble.Assembler._price

    def counting(assembler: assemble.Assembler) -> None:
        priced.append(assembler)
        price(assembler)

    monkeypatch.setattr(assemble.Assembler, "_price", counting)
    context = MeshContext.of(MeshShape.of((2, 4)), Request(Cluster.parse("8xcpu")))
    on_mesh = StepOnMesh(context, form)
    roomy = on_mesh.cheapest(NO_LIMIT_BYTES)
    limited = on_mesh.within(roomy.peak_bytes // 2)
    lightest = on_mesh.lightest
    assert len(priced) == 1
    assert limited is not None
    assert lightest.peak_bytes < roomy.peak_bytes


def test_a_step_of_many_ops_is_read_once_and_priced_once_a_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meshes that are compared share the reading, and the best one's prices are still there."""
    step, args = mlp(30, width=64, rows=64)
    assert traced(step, *args).graph.op_count > 200
    read: list[object] = []
    priced: list[str] = []
    read_graph, price = reading.read_graph, Optimal.price

    def reads(merged: Merged, partial_sums: bool) -> Reading:
        read.append(merged)
        return read_graph(merged, partial_sums)

    def prices(self: Optimal, given: Graph, setting: Setting, pins: Any, recipe: Any) -> Any:
        if recipe.name == "auto":
            priced.append(str(setting.mesh))
        return price(self, given, setting, pins, recipe)

    monkeypatch.setattr(reading, "read_graph", reads)
    monkeypatch.setattr(Optimal, "price", prices)
    autopar.plan(step, *args, cluster="8xcpu")
    assert len(read) == 1
    assert sorted(priced) == ["data=2, model=4", "data=8"]  # 4 x 2 is the former here


@pytest.mark.parametrize("cluster", ["8xcpu", "8xh100"])
def test_a_mesh_that_is_left_out_has_the_plan_of_its_like(cluster: str) -> None:
    step, args = mlp(3, width=256, rows=512)
    kept, left_out = (
        autopar.plan(step, *args, cluster=cluster, mesh=mesh) for mesh in ((2, 4), (4, 2))
    )
    assert kept.prediction.seconds == pytest.approx(left_out.prediction.seconds, rel=1e-9)
    assert kept.prediction.peak_bytes == left_out.prediction.peak_bytes


def test_the_lightest_plan_knows_of_copies() -> None:
    """Rows alone lay state over every device and gather it whole: as held, more than no limit."""
    step, args = CASES["mlp4-adam v5p:4x4x4/3 at 0.3"].build()
    form = Form(None, traced(step, *args).graph)
    mesh = MeshShape.of((4, 4, 4))
    on_mesh = StepOnMesh(MeshContext.of(mesh, Request(Cluster.parse("v5p:4x4x4"))), form)
    roomy, lightest = on_mesh.cheapest(NO_LIMIT_BYTES), on_mesh.lightest
    assert lightest.peak_bytes < 0.6 * roomy.peak_bytes


def test_of_plans_that_hold_little_the_fastest_comes_first() -> None:
    """One of them holds no more than the lightest, which may take longer than another that fits."""
    step, args = CASES["mlp4-adam v5p:4x4x4/3 at 0.3"].build()
    form = Form(None, traced(step, *args).graph)
    context = MeshContext.of(MeshShape.of((4, 4, 4)), Request(Cluster.parse("v5p:4x4x4")))
    on_mesh = StepOnMesh(context, form)
    light = list(on_mesh.light())
    assert len(light) > 1
    assert [p.seconds for p in light] == sorted(p.seconds for p in light)
    assert min(p.peak_bytes for p in light) == on_mesh.lightest.peak_bytes


def test_a_hopeless_refusal_goes_into_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step begins with is too much, in whatever form it runs."""
    case = CASES["mlp4-adam 8x8xh100/2 at 0.05"]
    step, args = case.build()
    begins_with = 3 * 4 * (1024 * 1024 * 4) // 64  # parameters and two moments on 64 devices
    gone_into: list[object] = []
    monkeypatch.setattr(best_mesh, "plan_on", lambda tried, *_: gone_into.append(tried))
    with pytest.raises(MemoryLimitError):
        autopar.plan(step, *args, memory_gb=0.9 * begins_with / 2**30, **case.options)
    assert not gone_into


def test_a_limit_makes_no_step_faster() -> None:
    """Where there is too little work to run beside moves, plans without a limit wait for them."""
    case = CASES["pair 2x8xh100/2"]
    step, args = case.build()
    roomy = autopar.plan(step, *args, **case.options).prediction
    limit = 0.9 * roomy.peak_bytes / 2**30
    limited = autopar.plan(step, *args, memory_gb=limit, **case.options).prediction
    assert roomy.seconds <= limited.seconds
