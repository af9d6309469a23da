"""Other choices of one decision: as good as trying everything, and no further than they must go."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.prices import Prices
from autopar.ir.sharding import MeshShape
from autopar.passes.shard.diagnose.infeasible import Posed
from autopar.passes.shard.diagnose.why import Case, anew, case_of, homed, others, unbound
from autopar.passes.shard.model.assemble import Assembled
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.solver.effort import FULL, QUICK
from autopar.passes.shard.solver.problem import Edge, Problem, Usage
from autopar.passes.shard.solver.solve import solve
from tests.passes.driving import ROOMY, setting, traced
from tests.passes.problems import brute_force, joint_peaks, joint_seconds, problems
from tests.toys import TOYS

LIMITLESS = float("inf")


def case(problem: Problem, chosen: tuple[int, ...]) -> Case:
    """A case of a bare problem: nothing was read from a graph."""
    assembled = Assembled(problem, tuple(() for _ in problem.costs), {})
    return Case(Posed(cast(Reading, None), assembled), chosen, MeshShape((), ()), False)


@settings(max_examples=60)
@given(problems(), st.data())
def test_every_other_choice_costs_what_trying_all_assignments_says(
    problem: Problem, data: st.DataObject
) -> None:
    best = brute_force(problem)
    assert best is not None
    node = data.draw(st.integers(0, len(problem.costs) - 1))
    total = np.moveaxis(joint_seconds(problem), node, 0)
    least = total.reshape(len(total), -1).min(axis=1)
    found = others(case(problem, best.choices[0]), node, LIMITLESS)
    assert {pick for pick, _ in found} == set(range(len(least))) - {best.choices[0][node]}
    for pick, answer in found:
        assert answer.seconds == pytest.approx(least[pick], rel=1e-5, abs=1e-12)
        if answer.choice:
            assert answer.choice[node] == pick
    seconds = [answer.seconds for _, answer in found]
    assert seconds == sorted(seconds)


@settings(max_examples=40)
@given(problems(memory=True), st.data())
def test_memory_is_kept_and_what_cannot_keep_it_has_no_answer(
    problem: Problem, data: st.DataObject
) -> None:
    total = joint_seconds(problem)
    fits = joint_peaks(problem) <= problem.limit_bytes * (1 + 1e-9)
    best = brute_force(problem)
    chosen = best.choices[0] if best is not None else (0,) * len(problem.costs)
    node = data.draw(st.integers(0, len(problem.costs) - 1))
    within = np.moveaxis(np.where(fits, total, np.inf), node, 0)
    least = within.reshape(len(within), -1).min(axis=1)
    for pick, answer in others(case(problem, chosen), node, problem.limit_bytes):
        assert answer.seconds == pytest.approx(least[pick], rel=1e-5, abs=1e-12)


def test_an_answer_from_a_start_keeps_the_limit() -> None:
    """The engine gave back an assignment over the limit where it started from one within it."""
    table = np.array([[2.0], [3.0], [1.0], [3.0], [0.0]])
    held = [[59.0, 44.0, 2.0, 8.0, 25.0], [40.0, 56.0, 53.0, 95.0, 15.0]]
    problem = Problem(
        (np.array([0.0, 1.0, 2.0, 0.0, 3.0]), np.array([3.0])),
        (Edge(0, 1, table),),
        tuple(Usage(0, t, t, np.array(row)) for t, row in zip((1, 3), held, strict=True)),
        56.0,
    )
    for start in (None, lambda: (1, 0)):
        for effort in (QUICK, FULL):
            found = solve(problem, start, effort)
            assert problem.fits(found.choice)
            assert found.seconds == 6.0


def test_what_differs_at_no_gain_goes_home() -> None:
    tie = np.zeros((2, 2))
    tie[0, 1] = tie[1, 0] = 5.0  # the first two move together or not at all, at no price
    problem = Problem(
        (np.zeros(2), np.zeros(2), np.zeros(2), np.array([0.0, 1.0])),
        (Edge(0, 1, tie), Edge(2, 3, np.array([[0.0, 0.0], [9.0, 0.0]]))),
    )
    asked = case(problem, (0, 0, 0, 0))
    assert homed(asked, (1, 1, 1, 1), {2}, LIMITLESS) == (0, 0, 1, 1)
    assert anew(asked, {2: 1}, LIMITLESS).choice == (0, 0, 1, 1)


@pytest.mark.parametrize("folds", [0, 10_000], ids=["folded", "unfolded"])
@pytest.mark.parametrize("name", sorted(TOYS))
def test_the_case_of_a_plan_means_the_plan(name: str, folds: int) -> None:
    fun, args = TOYS[name]
    graph, given_ = traced(fun, *args).graph, setting("2,4", "8xh100")
    optimal = Optimal(merge_above=folds)
    plan = optimal.run(graph, given_)
    priced = optimal.price(graph, given_, (), optimal.recipe)
    found = case_of(priced.within(given_.memory_bytes), plan, False)
    again = found.plan(found.chosen)
    assert again.values == plan.values
    assert again.assignments == plan.assignments
    assert again.uses == plan.uses
    assert found.seconds == pytest.approx(plan.outcome.seconds)


def test_a_pinned_decision_may_be_asked_as_if_it_were_free() -> None:
    fun, args = TOYS["update"]
    graph, free = traced(fun, *args).graph, setting("8", "8xh100")
    path = graph.inputs[0].path
    pinned = replace(free, pins=((path, ((), ())),))
    optimal = Optimal()
    plan = optimal.run(graph, pinned)
    priced = optimal.price(graph, pinned, pinned.pins, optimal.recipe)
    found = case_of(priced.within(pinned.memory_bytes), plan, False)
    place = found.place_of(graph.inputs[0].value.name)
    assert place is not None
    node = place.decision
    assert len(found.choices(node)) == 1
    tables = ReshardCosts(Prices(free.cluster, free.mesh))
    wider = unbound(found, node, plan, tables, free)
    assert wider.plan(wider.chosen).values == plan.values
    best = min(a.seconds for _, a in others(wider, node, ROOMY))
    assert min(best, wider.seconds) == pytest.approx(optimal.run(graph, free).outcome.seconds)
