"""A good answer in a hurry: exact shrinking, a few sweeps of the bound, and a price on memory.

Nothing is proven by it. It serves where an assignment has to be had for many problems at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.passes.shard.solver.bound import bound_problem
from autopar.passes.shard.solver.price import priced, weights_at
from autopar.passes.shard.solver.problem import Edge, Floats, Problem
from autopar.passes.shard.solver.reduce import reduce_problem

_SWEEPS = 4
_STEPS = 5  # prices tried where memory binds


def rough_answer(problem: Problem) -> tuple[int, ...]:
    """An assignment that fits the memory, or () where none was found."""
    plain = replace(problem, usages=())
    choice = near_answer(plain)
    if not np.isfinite(problem.seconds(choice)):
        return ()
    if problem.fits(choice):
        return choice
    weights, low, high = [np.zeros(len(c)) for c in problem.costs], 0.0, 0.0
    best: tuple[int, ...] = ()
    for _ in range(_STEPS):
        held = problem.held_bytes(choice)
        if not high:
            weights = weights_at(problem, _binding(held, problem.limit_bytes))
            high = problem.seconds(choice) / max(float(held.max()), 1.0) / 4
        price = 0.5 * (low + high) if best else high
        choice = near_answer(priced(plain, weights, price))
        if problem.fits(choice) and np.isfinite(problem.seconds(choice)):
            high = price
            if not best or problem.seconds(choice) < problem.seconds(best):
                best = choice
        else:
            low, high = price, high if best else price * 4
    return best


def near_answer(problem: Problem) -> tuple[int, ...]:
    """The best assignment that a few sweeps find, memory ignored."""
    open_nodes, small = _settled(problem)
    reduced = reduce_problem(small)
    rest = bound_problem(reduced.problem, _SWEEPS).choice if reduced.problem.costs else ()
    full = [0] * len(problem.costs)
    for node, picked in zip(open_nodes, reduced.restore(rest), strict=True):
        full[node] = picked
    return tuple(full)


def _settled(problem: Problem) -> tuple[list[int], Problem]:
    """The problem over the nodes that have a choice; what the others cost them is added."""
    open_nodes = [v for v, c in enumerate(problem.costs) if len(c) > 1]
    number = {v: i for i, v in enumerate(open_nodes)}
    dear = _dear(problem)
    costs = [np.minimum(problem.costs[v], dear) for v in open_nodes]
    edges: list[Edge] = []
    for e in problem.edges:
        left, right = number.get(e.left), number.get(e.right)
        table = np.minimum(e.table, dear)
        if left is not None and right is not None:
            edges.append(Edge(left, right, table))
        elif left is not None:
            costs[left] += table[:, 0]
        elif right is not None:
            costs[right] += table[0]
    return open_nodes, Problem(tuple(costs), tuple(edges))


def _dear(problem: Problem) -> float:
    """More than any possible assignment takes: it stands for what is impossible."""
    tables = (*problem.costs, *(e.table for e in problem.edges))
    return 1.0 + 2.0 * sum(float(t.max(initial=0.0, where=np.isfinite(t))) for t in tables)


def _binding(held: Floats, limit_bytes: float) -> list[int]:
    """The peak, and the worst times of the step's quarters that are over as well."""
    parts = [part for part in np.array_split(np.arange(len(held)), 4) if len(part)]
    worst = [int(part[held[part].argmax()]) for part in parts]
    return [t for t in worst if held[t] > limit_bytes]
