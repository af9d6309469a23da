"""A price on bytes at the times that bind: a bound with memory in it, and an answer that fits.

The Lagrangian of the memory rows: for any price p >= 0 a byte, the best of cost + p * bytes, less
p * limit, is a lower bound on every assignment that fits (Fisher, 1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.passes.shard.solver.bound import Bounded, bound_problem
from autopar.passes.shard.solver.problem import Floats, Problem

_DOUBLINGS, _HALVINGS = 40, 12
_SWEEPS = 30


@dataclass(frozen=True)
class PricedStart:
    """The best bound found, the best assignment that fits at the times, choices still possible."""

    bound_seconds: float
    seconds: float
    choice: tuple[int, ...]  # () where none was found
    left: tuple[npt.NDArray[np.int64], ...]

    @property
    def gap(self) -> float:
        """The share of the assignment's seconds that is not proven."""
        return max(0.0, (self.seconds - self.bound_seconds) / max(self.seconds, 1e-30))


def priced_start(problem: Problem, times: Sequence[int]) -> PricedStart:
    """Search one price for all the times: dear enough to fit, then as cheap as still fits."""
    weights = weights_at(problem, times)
    allowance = problem.limit_bytes * len(times)
    plain = replace(problem, usages=())
    every = tuple(np.arange(len(c)) for c in problem.costs)
    best: tuple[int, ...] = ()
    bound, low, high = -float("inf"), 0.0, _first_price(problem, weights)
    tried: list[tuple[float, Bounded]] = []
    for step in range(_DOUBLINGS + _HALVINGS):
        price = 0.5 * (low + high) if best else high
        answer = bound_problem(priced(plain, weights, price), _SWEEPS)
        tried.append((price, answer))
        bound = max(bound, answer.bound_seconds - price * allowance)
        if _fits(problem, answer.choice, times):
            high = price
            if not best or plain.seconds(answer.choice) < plain.seconds(best):
                best = answer.choice
        else:
            low, high = price, max(high, price * 4)
        if step >= _DOUBLINGS if not best else high <= low * 1.05:
            break
    seconds = plain.seconds(best) if best else float("inf")
    left = _possible(plain, weights, tried, seconds, allowance) if best else every
    return PricedStart(bound, seconds, best, left)


def weights_at(problem: Problem, times: Sequence[int]) -> list[Floats]:
    """Bytes of each node's choices, summed over the times."""
    weights = [np.zeros(len(c)) for c in problem.costs]
    for usage in problem.usages:
        hits = sum(usage.first <= t <= usage.last for t in times)
        if hits:
            weights[usage.node] = weights[usage.node] + hits * usage.nbytes
    return weights


def _first_price(problem: Problem, weights: Sequence[Floats]) -> float:
    seconds = sum(float(c.max()) for c in problem.costs) + 1e-9
    nbytes = sum(float(w.max()) for w in weights) + 1.0
    return seconds / nbytes


def priced(problem: Problem, weights: Sequence[Floats], price: float) -> Problem:
    """The problem with every choice's weight paid for."""
    costs = tuple(c + price * w for c, w in zip(problem.costs, weights, strict=True))
    return replace(problem, costs=costs)


def _fits(problem: Problem, choice: Sequence[int], times: Sequence[int]) -> bool:
    held = problem.held_bytes(choice)
    return all(held[t] <= problem.limit_bytes * (1 + 1e-9) for t in times)


def _possible(
    problem: Problem,
    weights: Sequence[Floats],
    tried: Sequence[tuple[float, Bounded]],
    seconds: float,
    allowance: float,
) -> tuple[npt.NDArray[np.int64], ...]:
    """Choices that the best of the tried prices cannot rule out below a known answer's seconds."""
    price, _ = max(tried, key=lambda t: t[1].bound_seconds - t[0] * allowance)
    return bound_problem(
        priced(problem, weights, price), _SWEEPS * 2, limit=seconds + price * allowance
    ).left
