"""The assignment that holds the least, and a bound below which no limit can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.shard.solver.elimination import eliminate
from autopar.passes.shard.solver.heuristic import first_answer
from autopar.passes.shard.solver.problem import Copy, Edge, Floats, Problem, needed_bytes

_ROUNDS = 20
_STALE = 4  # rounds without a lighter one
_SURE = 1 + 1e-9
_ROOM = (1.0, 1.5, 3.0)


@dataclass(frozen=True)
class Least:
    """The least peak found with its assignment, and a bound that no assignment goes below.

    Infinite, with (), where no assignment at all was found.
    """

    choice: tuple[int, ...]
    nbytes: float
    bound_bytes: float


def min_memory(problem: Problem, copies: Sequence[Copy] = ()) -> Least:
    """Lets each node take the choice that holds least, weighed by how near the peak it is held.

    Each round the times that were highest weigh more. Where nodes cannot be taken one by one, for
    a move between two choices may be impossible or hold a copy, they are weighed together.
    """
    bound = needed_bytes(problem)
    weight = np.ones(max(problem.horizon, 1))
    best: tuple[int, ...] = ()
    least, stale = float("inf"), 0
    for _ in range(_ROUNDS):
        choice = _lightest(problem, weight, copies)
        if not choice:
            break
        over_time = problem.held_bytes(choice)
        for copy in copies:
            over_time[copy.first : copy.last + 1] += copy.held[
                choice[copy.left], choice[copy.right]
            ]
        peak = float(over_time.max()) if over_time.size else 0.0
        stale += 1
        if peak < least:
            best, least, stale = choice, peak, 0
        if stale == _STALE:
            break
        if least <= bound * _SURE or not over_time.size:
            break
        weight = weight * (1 + over_time / max(peak, 1.0))
        weight = weight / weight.max()
    return Least(best, least, bound)


def light_answers(problem: Problem, copies: Sequence[Copy]) -> tuple[tuple[int, ...], ...]:
    """Assignments that hold little, whatever the limit: the least, and cheap ones that hold more.

    What is neither in the rows nor among the copies may be less where moves cost less.
    """
    least = min_memory(problem)
    if not least.choice:
        return ()
    copied = min_memory(problem, copies).choice
    limits = (replace(problem, limit_bytes=least.nbytes * n * _SURE) for n in _ROOM)
    return (least.choice, copied, *(c for p in limits if (c := first_answer(p).choice)))


def fits_nowhere(problem: Problem) -> bool:
    """True if no assignment keeps the limit, by the bound alone."""
    return needed_bytes(problem) > problem.limit_bytes * _SURE


def _lightest(problem: Problem, weight: Floats, copies: Sequence[Copy]) -> tuple[int, ...]:
    """The possible assignment of least weighed bytes, or () if none is found."""
    held: list[Floats] = [np.zeros(len(c)) for c in problem.costs]
    summed = np.concatenate([[0.0], np.cumsum(weight)])
    for usage in problem.usages:
        held[usage.node] += (summed[usage.last + 1] - summed[usage.first]) * usage.nbytes
    held = [np.where(np.isinf(c), np.inf, h) for c, h in zip(problem.costs, held, strict=True)]
    choice = tuple(int(h.argmin()) for h in held)
    if not copies and np.isfinite(problem.seconds(choice)):
        return choice
    edges = tuple(
        Edge(e.left, e.right, np.where(np.isinf(e.table), np.inf, 0.0)) for e in problem.edges
    ) + tuple(
        Edge(c.left, c.right, (summed[c.last + 1] - summed[c.first]) * c.held) for c in copies
    )
    choice = eliminate(replace(problem, costs=tuple(held), edges=edges, usages=())).choice
    return choice if np.isfinite(problem.seconds(choice)) else ()
