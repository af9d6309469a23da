"""The solver against a search through everything, and each of its steps against its own law."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.sharding_plan import Status
from autopar.passes.shard.solver import solve as solving
from autopar.passes.shard.solver.anytime import Anytime
from autopar.passes.shard.solver.branch_and_bound import branch_and_bound
from autopar.passes.shard.solver.dual_ascent import DualAscent
from autopar.passes.shard.solver.effort import QUICK, Effort, WorkMeter
from autopar.passes.shard.solver.elimination import eliminate
from autopar.passes.shard.solver.heuristic import first_answer, min_memory
from autopar.passes.shard.solver.integer_program import solve_integer_program
from autopar.passes.shard.solver.problem import Edge, Problem, Usage, narrow, to_csr
from autopar.passes.shard.solver.shrink import shrink
from autopar.passes.shard.solver.solve import Solution, solve
from benchmarks.iopddl import Clock
from tests.passes.problems import KNOWN, brute_force, joint_seconds, problems

thoroughly = settings(
    max_examples=80,
    derandomize=True,
    database=None,
)
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


# -- every stage on every problem ------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a stage says of a problem; `exact` where it must be the best, or proof of none."""

    choice: tuple[int, ...]
    bound: float = -np.inf
    exact: bool = False


def by_elimination(problem: Problem) -> Found:
    found = eliminate(replace(problem, usages=()))
    fits = problem.fits(found.choice)
    bound = found.seconds if found.exact else -np.inf
    return Found(found.choice if fits else (), bound, found.exact and fits)


def by_narrow_elimination(problem: Problem) -> Found:
    """With hardly any room for tables, so that nodes are settled by the heuristic."""
    choice = eliminate(replace(problem, usages=()), 10).choice
    return Found(choice if problem.fits(choice) else ())


def by_first_answer(problem: Problem) -> Found:
    found = first_answer(problem)
    return Found(found.choice, found.bound_seconds)


def by_branch_and_bound(problem: Problem) -> Found:
    found = branch_and_bound(problem)
    return Found(found.choice, found.bound_seconds, True)


def by_few_labels(problem: Problem) -> Found:
    """With hardly any room for tables, so that they are split, and for labels."""
    found = branch_and_bound(problem, (10, 12), (2, 4))
    return Found(found.choice, found.bound_seconds)


def by_highs(problem: Problem) -> Found:
    found = solve_integer_program(problem, solvers=("highs",))
    return Found(found.choice, found.bound_seconds, True)


def by_cbc(problem: Problem) -> Found:
    try:
        found = solve_integer_program(problem, solvers=("cbc",))
    except SolverError:
        pytest.skip("CBC is not installed")
    return Found(found.choice, found.bound_seconds, True)


def by_turns(problem: Problem) -> Found:
    form = to_csr(problem)
    if form.fits_nowhere:
        return Found((), np.inf, True)
    search = Anytime(problem, form, 0)
    search.run(WorkMeter(100))
    choice = () if search.best is None else tuple(int(c) for c in search.best)
    return Found(choice, np.inf if search.fits_nowhere else search.bound)


def by_solving(problem: Problem) -> Found:
    found = solve(problem)
    return Found(found.choice, found.bound_seconds, True)


def by_solving_quickly(problem: Problem) -> Found:
    found = solve(problem, effort=QUICK)
    return Found(found.choice, found.bound_seconds)


def by_least_memory(problem: Problem) -> Found:
    choice = min_memory(problem).choice
    return Found(choice if problem.fits(choice) else ())


STAGES: dict[str, Callable[[Problem], Found]] = {
    "elimination": by_elimination,
    "elimination of wide graphs": by_narrow_elimination,
    "first answer": by_first_answer,
    "branch and bound": by_branch_and_bound,
    "branch and bound with few labels": by_few_labels,
    "integer program in HiGHS": by_highs,
    "integer program in CBC": by_cbc,
    "dual and local search": by_turns,
    "solve": by_solving,
    "quick solve": by_solving_quickly,
    "least memory": by_least_memory,
}


def check_stage(stage: str, problem: Problem) -> None:
    """The answer fits, costs no less than the best, and the bound is one."""
    best, found = brute_force(problem), STAGES[stage](problem)
    if best is None:
        assert found.choice == ()
        return
    assert found.bound <= best.seconds * (1 + 1e-9) + 1e-12
    if found.choice:
        assert problem.fits(found.choice)
        assert problem.seconds(found.choice) >= best.seconds * (1 - 1e-9) - 1e-12
    if found.exact:
        assert is_best(problem, found.choice, best.seconds)


@pytest.mark.parametrize("name", [n for n in KNOWN if n != "no nodes"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_on_every_known_problem(stage: str, name: str) -> None:
    check_stage(stage, KNOWN[name][0])


@pytest.mark.parametrize("stage", STAGES)
@settings(thoroughly, max_examples=25)
@given(problem=problems(memory=True, nodes=5))
def test_every_stage_on_any_problem(problem: Problem, stage: str) -> None:
    check_stage(stage, problem)


def test_no_solver_at_all_says_what_to_install() -> None:
    with pytest.raises(SolverError, match="pip install highspy"):
        solve_integer_program(KNOWN["one node"][0], solvers=())


# -- each stage's own law --------------------------------------------------------------------------


@thoroughly
@given(problem=problems())
def test_elimination_with_room_is_exact(problem: Problem) -> None:
    best, found = brute_force(problem), eliminate(problem)
    assert best is not None
    assert found.exact
    assert found.seconds == pytest.approx(best.seconds)
    assert eliminate(problem, 10).seconds >= found.seconds - 1e-12


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


@thoroughly
@given(problem=problems(memory=True))
def test_the_dual_spares_every_best_answer(problem: Problem) -> None:
    """What its bound fixes out at a best answer's cost is in no best answer."""
    best, form = brute_force(problem), to_csr(problem)
    if best is None or form.fits_nowhere:
        return
    ascent = DualAscent(form)
    for _, read in zip(range(20), ascent.steps(), strict=False):
        assert ascent.bound <= best.seconds * (1 + 1e-9) + 1e-12
        assert not read.fits or read.cost >= best.seconds * (1 - 1e-9) - 1e-12
    left = ascent.left_below(best.seconds * (1 + 1e-9))
    for choice in best.choices:
        assert all(c in few for c, few in zip(choice, left, strict=True))


def test_the_bound_of_a_tree_is_its_optimum() -> None:
    rng = np.random.default_rng(0)
    edges = tuple(Edge(u, v, rng.random((4, 4))) for u, v in [(0, 1), (1, 2), (1, 3), (3, 4)])
    problem = Problem(tuple(rng.random(4) for _ in range(5)), edges)
    best = brute_force(problem)
    assert best is not None
    assert DualAscent(to_csr(problem)).bound == pytest.approx(best.seconds)


def wide(nodes: int, choices: int, seed: int) -> Problem:
    """A dense graph whose cheap choices hold much: nothing of it is solved at once."""
    draws = np.random.default_rng(seed)
    costs = tuple(np.sort(draws.random(choices)) for _ in range(nodes))
    edges = tuple(
        Edge(u, v, draws.random((choices, choices)))
        for u in range(nodes)
        for v in range(u + 1, nodes)
        if draws.random() < 0.4
    )
    usages = tuple(Usage(v, v, v + 9, np.linspace(9, 0, choices).round()) for v in range(nodes))
    return Problem(costs, edges, usages, 30.0)


def test_a_start_is_asked_for_only_where_the_least_work_proves_nothing() -> None:
    """To find one, as the best of all recipes, may take as long as the search itself."""

    def scaled(share: float) -> Problem:
        """Moves count little beside the choices' own costs, or much."""
        problem = wide(60, 8, 0)
        edges = tuple(replace(e, table=e.table * share) for e in problem.edges)
        return replace(problem, edges=edges, usages=())

    asked: list[float] = []

    def start(share: float) -> tuple[int, ...]:
        asked.append(share)
        return ()

    easy, hard = (solve(scaled(s), partial(start, s)) for s in (0.02, 0.1))
    assert easy.status is Status.OPTIMAL
    assert hard.status is Status.FEASIBLE
    assert asked == [0.1]


def test_a_level_of_work_that_brings_nothing_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound under memory limits is seldom tight: the gap alone would ask for all levels."""
    seen: list[tuple[float, float]] = []
    run = Anytime.run

    def noted(search: Anytime, meter: WorkMeter) -> None:
        run(search, meter)
        seen.append((search.cost, search.cost - search.bound))

    monkeypatch.setattr(Anytime, "run", noted)
    found = solve(wide(60, 8, 0))
    assert found.gap > 0.1
    assert 2 < len(seen) < len(solving._LEVELS)

    def brought(before: tuple[float, float], after: tuple[float, float]) -> bool:
        return after[0] <= 0.999 * before[0] or after[1] <= 0.75 * before[1]

    *followed, last = [brought(*pair) for pair in pairwise(seen[1:])]
    assert all(followed)
    assert not last


def test_nothing_is_begun_when_all_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are fixed out, and integer programs solved, with no eye on the clock."""

    def begun(*_: object) -> None:
        pytest.fail("it began with nothing left")

    problem = wide(40, 6, 0)
    search = Anytime(problem, to_csr(problem), 0)
    spent = WorkMeter(1)
    spent.spend(1e9)
    monkeypatch.setattr("autopar.passes.shard.solver.anytime.narrow", begun)
    search.run(spent)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci), 2])
def test_a_tenth_of_the_work_gives_a_good_answer(seed: int) -> None:
    """The first answers come early: a busy machine that has little time is not far off."""
    problem = wide(40, 8, seed)
    whole = solve(problem, effort=Effort(work=1000))
    for part, off in ((10, 1.05), (100, 1.2)):
        few = solve(problem, effort=Effort(work=1000 // part))
        assert problem.fits(few.choice)
        assert few.seconds <= off * whole.seconds


@thoroughly
@given(problem=problems(memory=True), data=st.data())
def test_an_assignment_is_no_worse_once_it_is_shrunk(problem: Problem, data: st.DataObject) -> None:
    choice = tuple(data.draw(st.integers(0, len(c) - 1)) for c in problem.costs)
    small = shrink(problem)
    inside = small.shrink(choice) if small.possible else None
    if inside is None:
        assert problem.seconds(choice) == float("inf") or not problem.fits(choice)
        return
    again = small.restore([int(c) for c in inside])
    assert problem.seconds(again) <= problem.seconds(choice) * (1 + 1e-12) + 1e-12
    assert (problem.held_bytes(again) <= problem.held_bytes(choice) + 1e-9).all()


def test_what_no_room_is_left_for_goes_before_the_search() -> None:
    """Once a heavy choice is out, the others hold more at least, and theirs are out too."""
    cheaper_apart = Edge(0, 1, np.array([[9.0, 0.0], [0.0, 9.0]]))
    usages = (
        Usage(0, 0, 0, np.array([9.0, 1.0])),  # 9 is more than the limit
        Usage(0, 2, 2, np.array([0.0, 4.0])),  # so that 4 is the least here
        Usage(1, 2, 2, np.array([5.0, 3.0])),  # beside which 5 is too much
    )
    problem = Problem((np.array([0.0, 5.0]),) * 2, (cheaper_apart,), usages, 7.0)
    small = shrink(problem)
    assert [small.shrink(c) is not None for c in np.ndindex(2, 2)] == [False, False, False, True]
    assert small.restore([0] * len(small.living)) == (1, 1)
    assert solve(problem).choice == (1, 1)
    assert not shrink(replace(problem, limit_bytes=6.0)).possible


@pytest.mark.parametrize("seed", range(3))
def test_without_time_to_compile_there_is_a_good_answer(seed: int) -> None:
    """A machine so busy that no machine code is ever there still answers, and within the limit."""
    problem = wide(40, 8, seed)
    whole = solve(problem, effort=Effort(work=1000))
    none = solve(problem, deadline=Clock(0.0, time.monotonic()))
    assert problem.fits(none.choice)
    assert none.seconds <= 1.5 * whole.seconds
    assert none.bound_seconds <= whole.seconds
