"""The solver against a search through everything, and each of its steps against its own law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.outcome import Status
from autopar.passes.shard.solver.bound import bound_problem
from autopar.passes.shard.solver.contract import contract
from autopar.passes.shard.solver.ilp import solve_ilp
from autopar.passes.shard.solver.polish import improve, kicked
from autopar.passes.shard.solver.price import priced_start
from autopar.passes.shard.solver.problem import Edge, Problem, Usage, narrow
from autopar.passes.shard.solver.reduce import reduce_problem
from autopar.passes.shard.solver.solve import Solution, solve
from tests.passes.problems import KNOWN, brute_force, joint_seconds, problems

thoroughly = settings(
    max_examples=80, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
PRECISION = 2e-6  # the solver stops at a gap of 1e-6


def solved(problem: Problem) -> Solution:
    """Solved with no sharing of decisions."""
    return solve(problem)


def is_best(problem: Problem, choice: tuple[int, ...], best: float) -> bool:
    return problem.seconds(choice) <= best * (1 + PRECISION) + 1e-12


# -- the whole solver ------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    problem, best = KNOWN[name]
    answer = solved(problem)
    if best is None:
        assert answer.choice == ()
        assert answer.seconds == float("inf")
    else:
        assert answer.seconds == pytest.approx(best)
        assert len(answer.choice) == len(problem.costs)
        assert answer.status is (Status.OPTIMAL if problem.costs else Status.FIXED)


@thoroughly
@given(problem=problems())
def test_the_best_without_memory(problem: Problem) -> None:
    best = brute_force(problem)
    assert best is not None
    answer = solved(problem)
    assert is_best(problem, answer.choice, best.seconds)
    assert answer.seconds == problem.seconds(answer.choice)
    assert answer.bound_seconds <= best.seconds * (1 + 1e-9)
    assert answer.status is Status.OPTIMAL


@thoroughly
@given(
    problem=problems(choices=3), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.2, 0.5])
)
def test_what_is_forbidden_is_never_chosen(problem: Problem, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)

    def with_forbidden(edge: Edge) -> Edge:
        forbidden = rng.random(edge.table.shape) < share
        return replace(edge, table=np.where(forbidden, np.inf, edge.table))

    odd = replace(problem, edges=tuple(map(with_forbidden, problem.edges)))
    best, answer = brute_force(odd), solved(odd)
    if best is None:
        assert (answer.choice, answer.proven_infeasible) == ((), True)
    else:
        assert is_best(odd, answer.choice, best.seconds)


@thoroughly
@given(problem=problems(memory=True))
def test_the_best_that_fits(problem: Problem) -> None:
    best = brute_force(problem)
    answer = solved(problem)
    if best is None:
        assert answer.choice == ()
        return
    assert problem.fits(answer.choice)
    assert is_best(problem, answer.choice, best.seconds)
    assert answer.bound_seconds <= best.seconds * (1 + 1e-9)


@pytest.mark.parametrize("over", [1e-8, 5e-8, 5e-7, 2e-6])
def test_a_limit_missed_by_a_hair_is_missed(over: float) -> None:
    """Where the ILP's tolerance would let it pass, and the solver once asked again for ever."""
    usage = Usage(0, 0, 0, np.array([1e9 * (1 + over), 0.0]))
    assert solved(Problem((np.array([0.0, 1.0]),), (), (usage,), 1e9)).choice == (1,)


# -- integer programming alone ---------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@settings(thoroughly, max_examples=25)
@given(problem=problems(memory=True, nodes=5))
def test_integer_programming_alone(problem: Problem, solver: str) -> None:
    best = brute_force(problem)
    try:
        answer = solve_ilp(problem, tuple(range(problem.horizon)), 1e-6, (solver,))
    except SolverError:
        pytest.skip(f"{solver} is not installed")
    assert answer.feasible == (best is not None)
    if best is not None:
        assert is_best(problem, answer.choice, best.seconds)
        assert problem.fits(answer.choice)
        assert answer.bound_seconds <= best.seconds


def test_no_solver_at_all_says_what_to_install() -> None:
    with pytest.raises(SolverError, match="pip install highspy"):
        solve_ilp(KNOWN["one node"][0], (), 1e-6, ())


# -- reductions ------------------------------------------------------------------------------------


@thoroughly
@given(problem=problems())
def test_what_is_eliminated_comes_back(problem: Problem) -> None:
    reduced = reduce_problem(problem)
    small = brute_force(reduced.problem)
    whole = brute_force(problem)
    assert small is not None
    assert whole is not None
    choice = reduced.restore(small.choices[0])
    assert problem.seconds(choice) == pytest.approx(small.seconds + reduced.offset_seconds)
    assert problem.seconds(choice) == pytest.approx(whole.seconds)


@thoroughly
@given(problem=problems(memory=True))
def test_nodes_that_are_kept_keep_their_memory(problem: Problem) -> None:
    watched = frozenset(u.node for u in problem.usages)
    reduced = reduce_problem(problem, watched)
    small, whole = brute_force(reduced.problem), brute_force(problem)
    assert (small is None) == (whole is None)
    assert watched <= set(reduced.kept)
    if small is not None and whole is not None:
        choice = reduced.restore(small.choices[0])
        assert problem.fits(choice)
        assert problem.seconds(choice) == pytest.approx(whole.seconds)


def test_chains_stars_and_cycles_vanish_but_cliques_stay() -> None:
    rng = np.random.default_rng(0)

    def left(pairs: list[tuple[int, int]], count: int) -> int:
        edges = tuple(Edge(u, v, rng.random((3, 3))) for u, v in pairs)
        return len(reduce_problem(Problem((rng.random(3),) * count, edges)).kept)

    assert left([(0, 1), (1, 2), (2, 3)], 4) == 0
    assert left([(0, 1), (0, 2), (0, 3)], 4) == 0
    assert left([(0, 1), (1, 2), (2, 3), (3, 0)], 4) == 0
    assert left([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 4) == 4


@thoroughly
@given(problem=problems(memory=True))
def test_fewer_choices_are_the_same_problem_on_them(problem: Problem) -> None:
    left = [np.arange(len(c))[::-2] for c in problem.costs]
    slim = narrow(problem, left)
    grid = np.ix_(*left)
    np.testing.assert_allclose(joint_seconds(slim.problem), joint_seconds(problem)[grid])
    for choice in np.ndindex(*(len(k) for k in left)):
        back = slim.restore(choice)
        assert slim.problem.seconds(choice) == pytest.approx(problem.seconds(back))
        assert slim.problem.peak_bytes(choice) == problem.peak_bytes(back)


# -- bounds ----------------------------------------------------------------------------------------


@thoroughly
@given(problem=problems())
def test_the_bound_is_one_and_spares_a_best_answer(problem: Problem) -> None:
    best = brute_force(problem)
    assert best is not None
    for sweeps in (0, 3, 60):
        bounded = bound_problem(problem, sweeps)
        assert bounded.bound_seconds <= best.seconds * (1 + 1e-9) + 1e-12
        assert bounded.seconds == pytest.approx(problem.seconds(bounded.choice))
        assert bounded.seconds >= best.seconds - 1e-9
        assert any(
            all(c in k for c, k in zip(choice, bounded.left, strict=True))
            for choice in best.choices
        )


def test_the_bound_of_a_tree_is_its_optimum() -> None:
    rng = np.random.default_rng(0)
    edges = tuple(Edge(u, v, rng.random((4, 4))) for u, v in [(0, 1), (1, 2), (1, 3), (3, 4)])
    problem = Problem(tuple(rng.random(4) for _ in range(5)), edges)
    best = brute_force(problem)
    assert best is not None
    assert bound_problem(problem, 60).bound_seconds == pytest.approx(best.seconds)


@thoroughly
@given(problem=problems())
def test_local_search_never_makes_it_worse(problem: Problem) -> None:
    start = tuple(len(c) - 1 for c in problem.costs)
    better = improve(problem, start)
    assert problem.seconds(better) <= problem.seconds(start) + 1e-12
    assert problem.seconds(improve(problem, better)) == pytest.approx(problem.seconds(better))
    assert problem.seconds(kicked(problem, start, 5)) <= problem.seconds(start) + 1e-12


@thoroughly
@given(problem=problems(memory=True))
def test_a_price_on_bytes_bounds_what_fits(problem: Problem) -> None:
    best = brute_force(problem)
    times = tuple(range(problem.horizon))
    start = priced_start(problem, times)
    if best is None:
        assert start.choice == ()
        return
    assert start.bound_seconds <= best.seconds * (1 + 1e-9) + 1e-12
    if start.choice:
        assert problem.fits(start.choice)
    assert any(
        all(c in k for c, k in zip(choice, start.left, strict=True)) for choice in best.choices
    )


@thoroughly
@given(problem=problems(memory=True), data=st.data())
def test_an_assignment_is_no_worse_once_it_is_contracted(
    problem: Problem, data: st.DataObject
) -> None:
    choice = tuple(data.draw(st.integers(0, len(c) - 1)) for c in problem.costs)
    small = contract(problem)
    inside = small.shrink(choice) if small.possible else None
    if inside is None:
        assert problem.seconds(choice) == float("inf")
        return
    again = small.restore([int(c) for c in inside])
    assert problem.seconds(again) <= problem.seconds(choice) * (1 + 1e-12) + 1e-12
    assert (problem.held_bytes(again) <= problem.held_bytes(choice) + 1e-9).all()
