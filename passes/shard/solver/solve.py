"""Solves a sharding problem: small ones exactly, larger ones by the engine with a proven gap.

Small: shrink, bound, fix choices out, and integer programming on the rest, with memory rows added
at the times where an answer breaks the limit. Larger: `engine.py`, within a count of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.ir.outcome import Status
from autopar.passes.shard.solver.bound import bound_problem
from autopar.passes.shard.solver.effort import FULL, Effort
from autopar.passes.shard.solver.ilp import solve_ilp
from autopar.passes.shard.solver.polish import kicked
from autopar.passes.shard.solver.price import priced_start
from autopar.passes.shard.solver.problem import Floats, Narrowed, Problem, narrow
from autopar.passes.shard.solver.reduce import Reduced, reduce_problem

_MOST_ROWS = 200
_GAP = 1e-6
_FIRST_MARGIN, _MOST_MARGIN = 1e-6, 1e-2
_SWEEPS = 60
_ROUNDS, _KICKS = 3, 100
_LARGE = 40_000  # edge entries past which an answer within _LARGE_GAP is good enough
_LARGE_GAP = 0.02
_SMALL = 5_000  # edge entries up to which integer programming is quick without memory
_TINY = 1_000  # and with it
_WORK = (
    1_000,
    8_000,
    24_000,
    80_000,
)  # of the engine, in turn while the gap is more than _GOOD_GAP
_WHOLE, _LEAST_SHARE = 1_000_000, 0.06  # edge entries for all of that work; of fewer their share
_GOOD_GAP = 0.01
_FAR = 0.04  # from here only the most work helps


@dataclass(frozen=True)
class Solution:
    """A full assignment, its seconds, a lower bound and how it was found; () if none was found.

    `proven_infeasible` says whether nothing can fit; the price is what a byte more would save,
    0 where memory does not bind.
    """

    choice: tuple[int, ...]
    seconds: float
    bound_seconds: float
    status: Status
    sentence: str
    proven_infeasible: bool = False
    memory_price_seconds_per_byte: float = 0.0

    @property
    def feasible(self) -> bool:
        """True if an assignment fits."""
        return self.seconds < float("inf")


@dataclass(frozen=True)
class _Answer:
    choice: tuple[int, ...]
    bound_seconds: float
    rows: int = 0
    proven_infeasible: bool = False
    price: float = 0.0


def solve(problem: Problem, start: Sequence[int] | None = None, effort: Effort = FULL) -> Solution:
    """The cheapest assignment that fits, and never a dearer one than a `start` that fits.

    A QUICK answer to a large problem is the first good one.
    """
    if not problem.costs:
        return Solution((), 0.0, 0.0, Status.FIXED, "Nothing to decide.")
    answer = _answer(problem, start, effort.quick)
    choice = answer.choice
    if start is not None and problem.fits(start):
        choice = min((choice or tuple(start), tuple(start)), key=problem.seconds)
    if not choice:
        return _none(answer)
    seconds = problem.seconds(choice)
    if seconds == float("inf"):
        return _none(replace(answer, proven_infeasible=True))
    bound = min(answer.bound_seconds, seconds)
    status = Status.OPTIMAL if seconds - bound <= 10 * _GAP * seconds else Status.FEASIBLE
    sentence = "Solved exactly" if status is Status.OPTIMAL else "The best found"
    held = f", with memory limits at {answer.rows} moments" if answer.rows else ""
    sentence = f"{sentence}{held}."
    return Solution(choice, seconds, bound, status, sentence, False, answer.price)


def _none(answer: _Answer) -> Solution:
    sentence = "No assignment fits."
    if not answer.proven_infeasible:
        sentence = "No assignment that fits was found, and none is proven not to exist."
    endless = float("inf")
    proven = answer.proven_infeasible
    return Solution((), endless, endless, Status.FEASIBLE, sentence, proven)


def _answer(problem: Problem, start: Sequence[int] | None, quick: bool) -> _Answer:
    """Small problems exactly where memory does not bind, others by the engine."""
    entries = sum(e.table.size for e in problem.edges)
    if entries > _SMALL:
        return _searched(problem, start, entries, quick)
    finite = _finite(problem)
    answer = _unlimited(finite)
    if not answer.choice or problem.fits(answer.choice):
        return answer
    answer = _searched(problem, start, entries, quick)
    if quick or answer.proven_infeasible:
        return answer
    if not answer.choice:
        return _held(finite)  # which may prove that nothing fits
    seconds = problem.seconds(answer.choice)
    if entries <= _TINY and seconds - answer.bound_seconds > 10 * _GAP * abs(seconds):
        exact = _held(finite)
        return replace(exact, price=answer.price) if exact.choice else answer
    return answer


def _finite(problem: Problem) -> Problem:
    """The problem with what is forbidden dearer than any assignment that is not.

    The bound and the ILP subtract and scale costs, which an infinite one turns into no number.
    """
    tables = [*problem.costs, *(e.table for e in problem.edges)]
    if all(np.isfinite(table).all() for table in tables):
        return problem
    total = sum(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables)
    dearest = 3 * total if total else 1.0

    def held(table: Floats) -> Floats:
        return np.where(np.isfinite(table), table, dearest)

    edges = tuple(replace(e, table=held(e.table)) for e in problem.edges)
    return replace(problem, costs=tuple(map(held, problem.costs)), edges=edges)


def _searched(problem: Problem, start: Sequence[int] | None, entries: int, quick: bool) -> _Answer:
    """The engine's answer, with more work while its gap is wide."""
    from autopar.passes.shard.solver.engine import search_problem  # it brings numba along

    share = min(max(entries / _WHOLE, _LEAST_SHARE), 1.0)
    found = search_problem(
        problem, Effort(work=int(share * _WORK[0]), exact=not quick), start=start
    )
    last = 1 if quick else 2 if entries <= 2 * _LARGE else len(_WORK)
    levels: Sequence[int] = _WORK[1:last]
    for work in levels:
        enough = _GOOD_GAP if found.seconds_per_byte > 0 or work > _WORK[1] else 10 * _GAP
        if found.proven_infeasible or found.gap <= enough:
            break
        if found.gap > _FAR and work < levels[-1]:
            continue
        again = search_problem(problem, Effort(work=int(share * work)), start=found.choice or start)
        found = replace(again, bound_seconds=max(found.bound_seconds, again.bound_seconds))
    binds = found.seconds_per_byte > 0
    unsure = found.gap > 10 * _GAP and not quick
    if found.choice and not binds and unsure and entries <= _LARGE:
        return _unlimited(_finite(problem))
    rows = len(found.binding_times)
    return _Answer(
        found.choice, found.bound_seconds, rows, found.proven_infeasible, found.seconds_per_byte
    )


def _held(problem: Problem) -> _Answer:
    """Memory rows are added at the peaks of each answer until one fits.

    That is exact: it ends with the best answer of a problem that has fewer rows than the whole.
    Where the ILP breaks a row that it was given, by its own tolerance, the limit is drawn in.
    """
    answer = _unlimited(problem)
    times: list[int] = []
    margin = 0.0
    while answer.choice and not problem.fits(answer.choice):
        fresh = _worst_times(problem, answer.choice, times)
        margin = margin if fresh else max(10 * margin, _FIRST_MARGIN)
        times.extend(fresh)
        held = replace(problem, limit_bytes=problem.limit_bytes * (1 - margin))
        answer = replace(_limited(held, times), rows=len(times))
        if not answer.choice and not margin:
            return replace(answer, proven_infeasible=True)
        if len(times) > _MOST_ROWS or margin > _MOST_MARGIN:
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
    """The best answer where memory does not matter.

    Rounds of shrinking and bounding, each on what the last left possible; then the ILP, or what
    the rounds found where that is good enough and the rest is large.
    """
    shrunk = _Shrunk(replace(problem, usages=()))
    best: tuple[int, ...] = ()
    bound = -float("inf")
    for _ in range(_ROUNDS):
        if not shrunk.problem.costs:
            break
        bounded = bound_problem(shrunk.problem, _SWEEPS)
        bound = max(bound, shrunk.offset_seconds + bounded.bound_seconds)
        found = shrunk.restore(bounded.choice)
        if not best or problem.seconds(found) < problem.seconds(best):
            best = found
        if problem.seconds(best) - bound <= _GAP * problem.seconds(best):
            return _Answer(best, bound)
        shrunk.keep(bounded.left)
    if not shrunk.problem.costs:
        choice = shrunk.restore(())
        return _Answer(choice, problem.seconds(choice))
    best = min((best, kicked(problem, best, _KICKS)), key=problem.seconds)
    large = sum(e.table.size for e in shrunk.problem.edges) > _LARGE
    if large and problem.seconds(best) - bound <= _LARGE_GAP * problem.seconds(best):
        return _Answer(best, bound)
    gap = _LARGE_GAP if large else _GAP
    answer = solve_ilp(shrunk.problem, (), gap)
    exact = shrunk.restore(answer.choice)
    chosen = min((exact, best), key=problem.seconds) if best else exact
    return _Answer(chosen, max(bound, shrunk.offset_seconds + answer.bound_seconds))


class _Shrunk:
    """A problem that gets smaller in turns of eliminating nodes and dropping choices."""

    def __init__(self, problem: Problem) -> None:
        first = reduce_problem(problem)
        self.problem, self.offset_seconds = first.problem, first.offset_seconds
        self._ways_back: list[Reduced | Narrowed] = [first]

    def keep(self, left: Sequence[npt.NDArray[np.int64]]) -> None:
        """Drop all but these choices, and eliminate what that lets go."""
        slim = narrow(self.problem, left)
        less = reduce_problem(slim.problem)
        self._ways_back += [slim, less]
        self.problem = less.problem
        self.offset_seconds += less.offset_seconds

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the whole problem that one of the small problem stands for."""
        for way in reversed(self._ways_back):
            choice = way.restore(choice)
        return tuple(choice)


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
    large = sum(e.table.size for e in reduced.problem.edges) > _LARGE
    if large and start.choice and start.gap <= _LARGE_GAP:
        return _Answer(start.choice, start.bound_seconds)
    answer = solve_ilp(reduced.problem, times, _LARGE_GAP if large else _GAP)
    if not answer.feasible:
        return _Answer((), float("inf"))
    choice = slim.restore(reduced.restore(answer.choice))
    return _Answer(choice, reduced.offset_seconds + answer.bound_seconds)
