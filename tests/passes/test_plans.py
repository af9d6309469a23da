"""Whole plans: the best of all assignments, worth what they say, and true to their prices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cluster.chip import Platform
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.errors import GraphError
from autopar.ir.graph import Op
from autopar.ir.sharding import Assignment, MeshShape, Sharding, replicated
from autopar.ir.sharding_plan import Status
from autopar.passes.base import Setting
from autopar.passes.lower.listing import OpShardings
from autopar.passes.shard.model.assemble import assemble
from autopar.passes.shard.model.choices import MeshChoices
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.read import Readings
from autopar.passes.shard.optimal import Optimal, plan_of
from autopar.passes.shard.solver.solve import solve
from tests.passes.corners import CORNERS
from tests.passes.driving import Traced, assembled, lowered, run_listing, setting, traced
from tests.passes.problems import joint_seconds
from tests.toys import TOYS

MOST_ASSIGNMENTS = 3e7


@functools.cache
def toy(name: str) -> Traced:
    fun, args = TOYS[name]
    return traced(fun, *args)


@functools.cache
def corner(name: str) -> Traced:
    fun, args = CORNERS[name]
    return traced(fun, *args)


# -- against all assignments -----------------------------------------------------------------------

# Which toys are small enough on which mesh: enough of them, and none silently left out.
ENOUGH = (
    ("2", "2xh100", set(TOYS) - {"scanned"}),
    ("4", "4xh100", set(TOYS) - {"scanned"}),
    ("2,2", "2x2xh100", {"product", "update", "layer", "looked_up", "turned", "extremes"}),
    ("2,2,2", "v5e:2x4", {"product", "looked_up", "normalized"}),
)


def test_ops_are_sharded_over_the_mesh_that_is_asked_for() -> None:
    """The same op under the same assignment lies by other axes there."""
    (op,) = (op for op in toy("product").graph.ops if op.kind == "dot_general")
    assert op.rule is not None
    homes = (replicated(len(op.results[0].shape)),)
    op_shardings, given = OpShardings(), Assignment((0,))
    for mesh in (MeshShape(("data",), (2,)), MeshShape(("model",), (2,))):
        wanted = op_shardings.of(op, op.rule, given, homes, (), mesh).wanted
        assert {a for sharding in wanted for a in sharding.axes()} == set(mesh.names)


def test_what_was_read_for_a_mesh_serves_another() -> None:
    graph, readings = toy("layer").graph, Readings()
    for partial_sums in (False, True):
        for mesh, cluster in (("2", "2xh100"), ("4", "4xh100"), ("2,2", "2x2xh100")):
            given = replace(setting(mesh, cluster), partial_sums=partial_sums)
            anew = Optimal().run(graph, given)
            assert Optimal(readings=readings).run(graph, given) == anew


@pytest.mark.parametrize(("mesh", "cluster", "names"), ENOUGH)
def test_the_plan_is_the_best_of_all(mesh: str, cluster: str, names: set[str]) -> None:
    given = setting(mesh, cluster)
    tried: set[str] = set()
    for name in TOYS:
        _, whole = assembled(toy(name).graph, given)
        if math.prod(len(c) for c in whole.problem.costs) > MOST_ASSIGNMENTS:
            continue
        tried.add(name)
        outcome = Optimal().run(toy(name).graph, given).outcome
        assert outcome.seconds == pytest.approx(float(joint_seconds(whole.problem).min()), rel=2e-6)
        assert outcome.status is Status.OPTIMAL
        assert outcome.bound_seconds <= outcome.seconds
    assert tried >= names, sorted(tried)


@pytest.mark.parametrize("name", TOYS)
def test_one_device_costs_no_communication(name: str) -> None:
    given = setting("1")
    plan = Optimal().run(toy(name).graph, given)
    assert all(s.is_replicated or s.axes() == ("data",) for _, s in plan.values)
    assert sum(c.seconds for _, c in lowered(toy(name).graph, plan, given).collectives()) == 0


# -- a plan's seconds are its program's ------------------------------------------------------------


@dataclass(frozen=True)
class InARow:
    """Prices at which nothing runs beside work; talk is free where it is `mute`."""

    real: Prices
    mute: bool

    @property
    def cluster(self) -> Cluster:
        return self.real.cluster

    @property
    def mesh(self) -> MeshShape:
        return self.real.mesh

    @property
    def platform(self) -> Platform:
        return self.real.platform

    def joined(self, kind: str, nbytes: float, axes: Sequence[str]) -> float:
        return 0.0 if self.mute else self.real.joined(kind, nbytes, axes)

    def exposed_share(self, kind: str) -> float:
        del kind
        return 1.0

    def kernel(self, op: Op, nbytes: float, share: float) -> float:
        return self.real.kernel(op, nbytes, share)

    def elementwise(self, nbytes: float) -> float:
        return self.real.elementwise(nbytes)


def law(step: Traced, given: Setting, seed: int | None) -> None:
    """The listing's collectives take no longer than the objective allots to moves."""
    reading, _ = assembled(step.graph, given)
    prices = Prices(given.cluster, given.mesh)
    free = MeshChoices(given.mesh).of(reading)
    whole, silent = (
        assemble(reading, free, ReshardCosts(cast(Prices, InARow(prices, m))), given.memory_bytes)
        for m in (False, True)
    )
    costs = whole.problem.costs
    if seed is not None:
        rng = np.random.default_rng(seed)
        costs = tuple(c + rng.random(len(c)) for c in costs)
    solution = solve(replace(whole.problem, costs=costs))
    plan = plan_of(reading, whole, solution, given.mesh)
    listing = lowered(step.graph, plan, given)
    moved = [c for _, c in listing.collectives()]
    talk = sum(c.runs * prices.collective(c.kind, c.nbytes, c.axes) for c in moved)
    allotted = whole.problem.seconds(solution.choice) - silent.problem.seconds(solution.choice)
    assert talk <= allotted * (1 + 1e-9) + 1e-12, f"{talk} > {allotted}\n{plan}\n{listing}"
    table = Resharder(prices)
    for move, _ in listing.moves():
        plain = move.combiner == "sum" or not move.before.partial
        if plain:
            route = table.route(move.value, move.before, move.after)
            assert (route.steps, route.collectives) == (move.steps, move.collectives)
            quiet = 1e-8 * (len(move.steps) - len(move.collectives))
            spent = sum(c.seconds for c in move.collectives) + quiet
            assert spent == pytest.approx(table.seconds(move.value, move.before, move.after))


@pytest.mark.parametrize("name", CORNERS)
def test_no_program_talks_longer_than_its_plan(name: str) -> None:
    law(corner(name), setting("2,4", "v5e:2x4"), None)


@pytest.mark.parametrize("name", CORNERS)
def test_nor_does_that_of_a_random_plan(name: str) -> None:
    law(corner(name), setting("2,2,2", "8xh100"), len(name))


def test_the_objective_of_the_plan_is_the_problems() -> None:
    given = setting("2,4", "8xh100")
    plan = Optimal().run(toy("two_products").graph, given)
    _, whole = assembled(toy("two_products").graph, given)
    best = solve(whole.problem)
    assert plan.outcome.seconds == pytest.approx(best.seconds, rel=1e-9)


def test_a_step_with_nothing_to_decide_has_a_plan(devices: list[jax.Device]) -> None:
    step, given = traced(lambda: jnp.zeros((4, 4)) + 1.0), setting("2,4")
    plan = Optimal().run(step.graph, given)
    assert plan.outcome.status is Status.FIXED
    got = run_listing(step, lowered(step.graph, plan, given), given)
    np.testing.assert_array_equal(got, np.ones((4, 4)))


def test_a_plan_that_does_not_fit_its_graph_is_refused() -> None:
    given = setting("2,4")
    step = toy("product")
    plan = Optimal().run(step.graph, given)
    odd = replace(plan, values=(("%0", Sharding((("data",), ("data",)))),))
    with pytest.raises(GraphError, match="cannot be sharded as"):
        odd.verify(step.graph)
    strange = replace(plan, values=(("%none", Sharding(())),))
    with pytest.raises(GraphError, match="has not"):
        strange.verify(step.graph)
