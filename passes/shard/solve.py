"""Solves a sharding problem: shrink, bound, fix choices out, and integer programming on the rest.

The bound alone proves most answers; what it leaves open goes to the ILP, as do memory rows, which
are added at the times where an answer breaks the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.outcome import Status
from autopar.passes.shard.bound import bound_problem
from autopar.passes.shard.ilp import solve_ilp
from autopar.passes.shard.narrow import narrow
from autopar.passes.shard.price import priced_start
from autopar.passes.shard.problem import Problem
from autopar.passes.shard.quotient import share_decisions
from autopar.passes.shard.reduce import reduce_problem

_MOST_ROWS = 200
_GAP = 1e-6
_SWEEPS = 60


@dataclass(frozen=True)
class Solution:
    """A full assignment, its seconds, a lower bound and how it was found; () if none fits."""

    choice: tuple[int, ...]
    seconds: float
    bound_seconds: float
    status: Status
    sentence: str


@dataclass(frozen=True)
class _Answer:
    choice: tuple[int, ...]
    bound_seconds: float
    rows: int = 0


def solve(problem: Problem, share_above: int, hops: int) -> Solution:
    """The cheapest assignment that fits the memory.

    Problems of more than `share_above` nodes let look-alike nodes within `hops` share a
    decision; the bound is then one on all such assignments.
    """
    if len(problem.costs) <= share_above:
        answer = _held(problem)
        sentence = "Proven best"
        choice = answer.choice
    else:
        shared = share_decisions(problem, hops)
        answer = _held(shared.problem)
        sentence = f"Best over {len(shared.problem.costs)} shared decisions"
        choice = shared.restore(answer.choice) if answer.choice else ()
    if not choice:
        return Solution((), float("inf"), float("inf"), Status.FEASIBLE, "No assignment fits.")
    seconds = problem.seconds(choice)
    bound = min(answer.bound_seconds, seconds)
    status = Status.OPTIMAL if seconds - bound <= 10 * _GAP * seconds else Status.FEASIBLE
    held = f", memory held at {answer.rows} times" if answer.rows else ""
    return Solution(choice, seconds, bound, status, f"{sentence}{held}.")


def _held(problem: Problem) -> _Answer:
    """Memory rows are added at the peaks of each answer until one fits.

    That is exact: it ends with the best answer of a problem that has fewer rows than the whole.
    """
    answer = _unlimited(problem)
    times: list[int] = []
    while answer.choice and not problem.fits(answer.choice):
        times.extend(_worst_times(problem, answer.choice, times))
        answer = replace(_limited(problem, times), rows=len(times))
        if len(times) > _MOST_ROWS:
            return _Answer((), answer.bound_seconds, len(times))
    return answer


def _worst_times(problem: Problem, choice: Sequence[int], held: Sequence[int]) -> list[int]:
    """The peak, and the worst times of the step's quarters that are over as well."""
    over = problem.held_bytes(choice)
    found: list[int] = []
    for part in np.array_split(np.arange(len(over)), 4):
        if len(part):
            t = int(part[np.argmax(over[part])])
            if over[t] > problem.limit_bytes * (1 + 1e-9) and t not in held:
                found.append(t)
    return found


def _unlimited(problem: Problem) -> _Answer:
    """The best answer where memory does not matter."""
    first = reduce_problem(replace(problem, usages=()))
    if not first.kept:
        choice = first.restore(())
        return _Answer(choice, problem.seconds(choice))
    bounded = bound_problem(first.problem, _SWEEPS)
    if bounded.gap <= _GAP:
        return _Answer(
            first.restore(bounded.choice), first.offset_seconds + bounded.bound_seconds
        )
    slim = narrow(first.problem, bounded.left)
    second = reduce_problem(slim.problem)
    offset = first.offset_seconds + second.offset_seconds
    if not second.kept:
        choice = first.restore(slim.restore(second.restore(())))
        return _Answer(choice, problem.seconds(choice))
    answer = solve_ilp(second.problem, (), _GAP)
    choice = first.restore(slim.restore(second.restore(answer.choice)))
    return _Answer(choice, offset + answer.bound_seconds)


def _limited(problem: Problem, times: Sequence[int]) -> _Answer:
    """The best answer with memory held at some times.

    A price on those times' bytes gives a bound and often an answer that fits; with both, most
    choices are out before the ILP sees the problem.
    """
    start = priced_start(problem, times)
    slim = narrow(problem, start.left)
    watched = frozenset(
        u.node for u in slim.problem.usages if any(u.first <= t <= u.last for t in times)
    )
    reduced = reduce_problem(slim.problem, watched)
    answer = solve_ilp(reduced.problem, times, _GAP)
    if not answer.feasible:
        return _Answer((), float("inf"))
    choice = slim.restore(reduced.restore(answer.choice))
    return _Answer(choice, reduced.offset_seconds + answer.bound_seconds)
