"""The assignment that holds the least, with the copies that moves make and without."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.shard.solver.heuristic import min_memory
from autopar.passes.shard.solver.problem import Copy, Edge, Problem, Usage
from tests.passes.problems import problems


def held_bytes(problem: Problem, copies: tuple[Copy, ...], choice: tuple[int, ...]) -> float:
    """The most that an assignment holds, its copies among it."""
    held = problem.held_bytes(choice)
    for c in copies:
        held[c.first : c.last + 1] += c.held[choice[c.left], choice[c.right]]
    return float(held.max())


def test_a_copy_decides_where_the_rows_would_have_it_otherwise() -> None:
    """A weight in four parts is the lightest at rest, and is gathered whole for its only reader."""
    usages = (Usage(0, 0, 2, np.array([1.0, 2.0])), Usage(1, 1, 1, np.array([4.0, 4.0])))
    moves = np.array([[1.0, 1.0], [0.0, 1.0]])
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, moves),), usages, 10.0)
    copy = Copy(0, 1, 1, 1, moves, np.array([[8.0, 8.0]]))
    assert min_memory(problem).choice[0] == 0
    found = min_memory(problem, (copy,))
    assert (found.choice, found.nbytes) == ((1, 0), 6.0)


@given(problems(memory=True, nodes=4, choices=3), st.integers(0, 2**32 - 1))
def test_what_is_told_is_held(problem: Problem, seed: int) -> None:
    """The bytes are those of the assignment, and none holds less than the bound."""
    rng = np.random.default_rng(seed)
    copies = tuple(
        Copy(
            e.left, e.right, 0, 0, e.table, rng.integers(0, 9, (1, e.table.shape[1])).astype(float)
        )
        for e in problem.edges
        if problem.horizon
    )
    found = min_memory(problem, copies)
    sizes = [range(len(c)) for c in problem.costs]
    able = [c for c in itertools.product(*sizes) if np.isfinite(problem.seconds(c))]
    assert bool(able) or not found.choice
    if not found.choice or not problem.horizon:
        return
    assert found.nbytes == held_bytes(problem, copies, found.choice)
    least = min(held_bytes(problem, copies, c) for c in able)
    assert found.bound_bytes <= least <= found.nbytes
