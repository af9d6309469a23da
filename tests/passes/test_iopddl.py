"""The IOPDDL form and the search behind its benchmark: laws on small problems, one real one."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from autopar.errors import InputError
from autopar.passes.shard.solver.effort import AbstractDeadline, AbstractMeter, Effort, WorkMeter
from autopar.passes.shard.solver.heuristic import mended_answers
from autopar.passes.shard.solver.local_search import add, grown, worst_row
from autopar.passes.shard.solver.problem import Edge, Problem, Usage, to_csr
from autopar.passes.shard.solver.shrink import shrink
from autopar.passes.shard.solver.solve import Solution, solve
from benchmarks.iopddl import exact_cost, exact_fits, main
from benchmarks.iopddl_file import read_iopddl, write_iopddl
from tests.passes.problems import brute_force, joint_peaks, joint_seconds, problems

DATA = Path(__file__).parents[3] / "shared/data/iopddl"
WORK = Effort(work=400)
SMALL = {
    "name": "three",
    "nodes": {
        "intervals": [[0, 2], [1, 3], [3, 3]],
        "costs": [[1, 5], [2, 0, 10**18], [7]],
        "usages": [[9, 1], [4, 6, 1], [50]],
    },
    "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[0, 3, 0, 2, 10**18, 0], [0, 1, 4]]},
    "usage_limit": 10,
}

thoroughly = settings(
    max_examples=30,
    derandomize=True,
    database=None,
)


def written(folder: Path, problem: object, name: str = "small.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(problem))
    return path


# -- the form --------------------------------------------------------------------------------------


def test_reads_the_form(tmp_path: Path) -> None:
    problem = read_iopddl(written(tmp_path, {"problem": SMALL}))
    assert [list(c) for c in problem.costs] == [[1, 5], [2, 0, np.inf], [7]]
    assert (problem.edges[0].left, problem.edges[0].right) == (0, 1)
    assert problem.edges[0].table.tolist() == [[0, 3, 0], [2, np.inf, 0]]
    assert [(u.node, u.first, u.last) for u in problem.usages] == [(0, 0, 1), (1, 1, 2)]
    assert problem.limit_bytes == 10
    assert problem.seconds((1, 0, 0)) == 5 + 2 + 7 + 2
    assert problem.held_bytes((1, 0, 0)).tolist() == [1, 5, 4]


@pytest.mark.parametrize("name", ["again.json", "again.json.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    problem = read_iopddl(written(tmp_path, {"problem": SMALL}))
    write_iopddl(problem, tmp_path / name, "again")
    again = read_iopddl(tmp_path / name)
    assert again.limit_bytes == problem.limit_bytes
    for old, new in zip(problem.costs, again.costs, strict=True):
        np.testing.assert_array_equal(old, new)
    for before, after in zip(problem.edges, again.edges, strict=True):
        np.testing.assert_array_equal(before.table, after.table)
    assert [(u.first, u.last) for u in again.usages] == [(0, 1), (1, 2)]


def faulty(**changes: object) -> dict[str, object]:
    return {"problem": {**SMALL, **changes}}


FAULTS: dict[str, tuple[object, str]] = {
    "no problem": ({}, "problem: missing"),
    "no limit": (faulty(usage_limit=None), "usage_limit: None is not a whole number"),
    "no edges": (faulty(edges={}), "edges.nodes: missing"),
    "unknown node": (
        faulty(edges={"nodes": [[0, 9]], "costs": [[1]]}),
        "edge 0: joins nodes 0 and 9 of 3",
    ),
    "short table": (
        faulty(edges={"nodes": [[0, 1]], "costs": [[1, 2]]}),
        "edge 0: 2 costs, not 2 x 3",
    ),
    "one table too few": (
        faulty(edges={"nodes": [[0, 1]], "costs": []}),
        "edges: 1 pairs of nodes and 0 tables",
    ),
    "usages of other length": (
        faulty(nodes={"intervals": [[0, 1]], "costs": [[1, 2]], "usages": [[1]]}),
        "node 0: 2 costs and 1 usages",
    ),
    "a word for a cost": (
        faulty(nodes={"intervals": [[0, 1]], "costs": [["x"]], "usages": [[1]]}),
        "nodes.costs[0]: not a list of whole numbers",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_file_and_entry(tmp_path: Path, fault: str) -> None:
    parsed, message = FAULTS[fault]
    path = written(tmp_path, parsed)
    with pytest.raises(InputError) as caught:
        read_iopddl(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.json.gz"
    path.write_bytes(gzip.compress(b"{")[:-3])
    with pytest.raises(InputError, match=r"broken.json.gz: cannot be read as JSON"):
        read_iopddl(path)


def test_only_whole_numbers_are_written(tmp_path: Path) -> None:
    problem = Problem((np.array([0.5]),), (), (), 1.0)
    with pytest.raises(InputError, match="whole numbers only"):
        write_iopddl(problem, tmp_path / "half.json")


# -- the steps ----------------------------------------------------------------------------


@thoroughly
@given(problem=problems())
def test_contracting_keeps_the_best(problem: Problem) -> None:
    """Some pairs are forbidden, so that nodes follow others."""
    tied = replace(
        problem,
        edges=tuple(
            Edge(e.left, e.right, np.where(np.eye(*e.table.shape) > 0, e.table, np.inf))
            if i % 2 == 0
            else e
            for i, e in enumerate(problem.edges)
        ),
    )
    best = brute_force(tied)
    small = shrink(tied)
    if best is None or best.seconds == np.inf:
        return
    found = brute_force(small.problem)
    assert found is not None
    whole = small.restore(found.choices[0])
    assert tied.fits(whole)
    assert tied.seconds(whole) == pytest.approx(best.seconds, rel=1e-9, abs=1e-12)


@thoroughly
@given(problem=problems())
def test_flat_rows_say_what_fits(problem: Problem) -> None:
    limit = float(np.median(joint_peaks(problem)))
    held = replace(problem, limit_bytes=limit)
    flat = to_csr(held).arrays
    for choice in np.ndindex(*[len(c) for c in problem.costs]):
        rows = np.zeros(len(flat.slack) + 1)
        for v, c in enumerate(choice):
            for h in range(flat.holdings[v], flat.holdings[v + 1]):
                rows[flat.firsts[h] : flat.lasts[h]] += flat.nbytes[flat.nbytes_at[h] + c]
        fits = bool((rows[:-1] <= flat.slack).all()) and bool((flat.slack >= 0).all())
        if not (flat.slack < 0).any():
            assert fits == held.fits(choice)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function was before it was compiled for the use of machine code alone."""
    found: Callable[..., Any] = getattr(function, "py_func", function)
    return found


def test_the_heap_knows_the_worst_row() -> None:
    draws = np.random.default_rng(0)
    rows = draws.integers(-50, 50, 37)
    heap, pending = grown(rows)
    for _ in range(100):
        first, last = sorted(draws.choice(38, 2, replace=False))
        change = int(draws.integers(-20, 20))
        rows[first:last] += change
        plain(add)(heap, pending, int(first), int(last), change)
        assert heap[1] == rows.max()
        assert rows[plain(worst_row)(heap, pending)] == rows.max()


# -- the whole ------------------------------------------------------------------------------------


@thoroughly
@given(problem=problems())
def test_bound_best_and_answer_stand_in_order(problem: Problem) -> None:
    peaks = joint_peaks(problem)
    limit = float(np.quantile(peaks, 0.3)) if problem.usages else float("inf")
    held = replace(problem, limit_bytes=limit)
    best = brute_force(held)
    found = solve(held, effort=WORK)
    if best is None:
        assert found.choice == ()
        return
    assert not found.proven_infeasible
    assert found.bound_seconds <= best.seconds + 1e-9 * abs(best.seconds) + 1e-12
    if found.choice:
        assert held.fits(found.choice)
        assert found.seconds == pytest.approx(held.seconds(found.choice))
        assert found.seconds <= 1.2 * best.seconds + 1e-9


@thoroughly
@given(problem=problems())
def test_nothing_within_the_least_is_proven(problem: Problem) -> None:
    if problem.usages and joint_peaks(problem).min() > 1:
        found = solve(replace(problem, limit_bytes=0.0), effort=WORK)
        assert found.choice == ()


@thoroughly
@given(problem=problems())
def test_without_memory_the_small_are_solved(problem: Problem) -> None:
    found = solve(replace(problem, usages=()), effort=WORK)
    least = float(joint_seconds(problem).min())
    assert found.seconds == pytest.approx(least, rel=0.02, abs=1e-9)


def busy(nodes: int = 24, seed: int = 3) -> Problem:
    """A grid of nodes whose cheap choices hold much."""
    draws = np.random.default_rng(seed)
    costs = [np.sort(draws.integers(0, 100, 5)).astype(float) for _ in range(nodes)]
    edges = [
        Edge(v, w, draws.integers(0, 60, (5, 5)).astype(float))
        for v in range(nodes)
        for w in (v + 1, v + 7)
        if w < nodes
    ]
    usages = [
        Usage(v, v, v + 1 + v % 9, np.array([50.0, 40.0, 20.0, 10.0, 0.0])) for v in range(nodes)
    ]
    return Problem(tuple(costs), tuple(edges), tuple(usages), 120.0)


@functools.cache
def busy_solution() -> Solution:
    """The answer to the busy problem, worked out once."""
    return solve(busy(), effort=WORK)


def test_the_same_work_gives_the_same_answer() -> None:
    found = busy_solution()
    assert solve(busy(), effort=WORK) == found
    assert found.choice
    assert busy().fits(found.choice)


def test_never_dearer_than_a_start_that_fits() -> None:
    problem, good = busy(), busy_solution()
    again = solve(problem, lambda: good.choice, Effort(work=1))
    assert again.seconds <= good.seconds
    assert problem.fits(again.choice)


def test_the_price_of_memory() -> None:
    problem = busy()
    assert busy_solution().memory_price_seconds_per_byte > 0
    roomy = solve(replace(problem, limit_bytes=1e9), effort=WORK)
    assert roomy.memory_price_seconds_per_byte == 0


def test_what_is_forbidden_everywhere_is_infeasible() -> None:
    table = np.full((2, 2), np.inf)
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, table),))
    found = solve(problem, effort=WORK)
    assert found.proven_infeasible
    assert found.choice == ()


class Over(AbstractDeadline):
    """A deadline that has passed when the search begins, as on a starved machine."""

    @property
    def is_over(self) -> bool:
        return True

    def answered(self) -> None:
        """Nothing: what counts is that there is an answer."""

    def builds(self, build: Callable[[], None]) -> bool:
        return False

    def meter(self) -> AbstractMeter:
        return WorkMeter(0)


def test_a_machine_without_time_answers() -> None:
    problem = busy()
    found = solve(problem, deadline=Over())
    assert found.choice
    assert problem.fits(found.choice)
    assert found.seconds <= 1.5 * solve(problem).seconds


@pytest.mark.parametrize(
    ("name", "best", "times"),
    [
        ("B", 532_843, 1.4),
        ("V", 1_617_084, 3.0),
        pytest.param("L", 1_946_000_000, 1.1, marks=pytest.mark.slow),
        pytest.param("C", 113_636_130_248, 1.05, marks=pytest.mark.slow),
    ],
)
def test_first_answers_of_contest_problems_are_sane(name: str, best: int, times: float) -> None:
    path = DATA / f"asplos-2025-iopddl-{name}.json.gz"
    if not path.exists():
        pytest.skip("the contest's problems are not here")
    problem = read_iopddl(path)
    small = shrink(problem)
    answers = [small.restore(choice) for choice in mended_answers(small.problem)]
    assert answers
    assert all(exact_fits(problem, choice) for choice in answers)
    assert min(exact_cost(problem, choice) for choice in answers) <= times * best


# -- the benchmark ---------------------------------------------------------------------------------


def test_benchmark_line_and_solution(tmp_path: Path) -> None:
    path = written(tmp_path, {"problem": SMALL})
    out = tmp_path / "choices.json"
    args = [str(path), "--work", "100", "--json", "--solution", str(out)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    line = json.loads(result.output)
    problem = read_iopddl(path)
    choices = json.loads(out.read_text())
    assert exact_fits(problem, choices)
    assert line["cost"] == exact_cost(problem, choices) == 16
    assert line["bound"] <= 16
    assert line["feasible"] is True


def test_benchmark_refuses_a_wrong_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path / "nothing.json"), "--work", "1"])
    assert result.exit_code == 2
    assert "nothing.json: cannot be read" in result.output


def test_a_contest_problem_within_a_percent() -> None:
    path = DATA / "asplos-2025-iopddl-B.json.gz"
    if not path.exists():
        pytest.skip("the contest's problems are not here")
    problem = read_iopddl(path)
    found = solve(problem, effort=Effort(work=3000))
    assert exact_fits(problem, found.choice)
    assert exact_cost(problem, found.choice) <= 532_843 * 1.01
    assert found.bound_seconds <= 532_843
