"""Small sharding problems, some with a known answer, and the search through all assignments."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from autopar.passes.shard.solver.problem import Edge, Problem, Usage

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Best:
    """The least seconds, and every assignment that takes no more."""

    seconds: float
    choices: tuple[tuple[int, ...], ...]


def joint_seconds(problem: Problem) -> Floats:
    """The objective of every assignment: one array dim for each node."""
    count = len(problem.costs)
    total = np.zeros([len(c) for c in problem.costs])
    for v, cost in enumerate(problem.costs):
        total = total + _spread(cost, (v,), count)
    for edge in problem.edges:
        table, ends = edge.table, (edge.left, edge.right)
        if ends[0] > ends[1]:
            table, ends = table.T, ends[::-1]
        total = total + _spread(table, ends, count)
    return total


def joint_peaks(problem: Problem) -> Floats:
    """The most bytes that each assignment ever holds."""
    count = len(problem.costs)
    peak = np.zeros([len(c) for c in problem.costs])
    for t in range(problem.horizon):
        held = np.zeros([len(c) for c in problem.costs])
        for usage in problem.usages:
            if usage.first <= t <= usage.last:
                held = held + _spread(usage.nbytes, (usage.node,), count)
        peak = np.maximum(peak, held)
    return peak


def _spread(table: Floats, nodes: tuple[int, ...], count: int) -> Floats:
    shape = [1] * count
    for node, size in zip(nodes, table.shape, strict=True):
        shape[node] = size
    return table.reshape(shape)


def brute_force(problem: Problem) -> Best | None:
    """Try everything; None where nothing fits the memory."""
    total = joint_seconds(problem)
    if problem.usages:
        slack = problem.limit_bytes * (1 + 1e-9)
        total = np.where(joint_peaks(problem) <= slack, total, np.inf)
    least = float(total.min())
    if not np.isfinite(least):
        return None
    found = np.argwhere(total <= least * (1 + 1e-9) + 1e-12)
    return Best(least, tuple(tuple(map(int, c)) for c in found))


# -- random problems -----------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, memory: bool = False, nodes: int = 6, choices: int = 5) -> Problem:
    """Chains, stars, cycles, cliques and scattered edges; some twice, some backward."""
    count = draw(st.integers(1, nodes))
    sizes = [draw(st.integers(1, choices)) for _ in range(count)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = draw(st.sampled_from(SHAPES))(count, rng)
    few = draw(st.booleans())  # few different numbers make many ties
    scale = draw(st.sampled_from([1.0, 1e-6]))

    def numbers(*shape: int) -> Floats:
        drawn = rng.integers(0, 4, shape).astype(float) if few else rng.random(shape) * 10
        return drawn * scale

    costs = tuple(numbers(n) for n in sizes)
    edges = tuple(Edge(u, v, numbers(sizes[u], sizes[v])) for u, v in pairs)
    plain = Problem(costs, edges)
    return with_memory(plain, rng) if memory else plain


def with_memory(problem: Problem, rng: np.random.Generator) -> Problem:
    """Random lifetimes, and a limit between too little and more than enough."""
    usages: list[Usage] = []
    for _ in range(int(rng.integers(1, 9))):
        node = int(rng.integers(len(problem.costs)))
        first = int(rng.integers(5))
        nbytes = rng.integers(0, 100, len(problem.costs[node])).astype(float)
        usages.append(Usage(node, first, first + int(rng.integers(4)), nbytes))
    whole = replace(problem, usages=tuple(usages))
    peaks = np.unique(joint_peaks(whole))
    limit = float(peaks[int(rng.integers(len(peaks)))]) + float(rng.integers(-1, 2))
    return replace(whole, limit_bytes=max(limit, 1.0))


Pairs = list[tuple[int, int]]


def _chain(count: int, rng: np.random.Generator) -> Pairs:
    del rng
    return [(i, i + 1) for i in range(count - 1)]


def _cycle(count: int, rng: np.random.Generator) -> Pairs:
    return _chain(count, rng) + ([(count - 1, 0)] if count > 2 else [])


def _star(count: int, rng: np.random.Generator) -> Pairs:
    del rng
    return [(0, i) for i in range(1, count)]


def _clique(count: int, rng: np.random.Generator) -> Pairs:
    del rng
    return list(itertools.combinations(range(count), 2))


def _scattered(count: int, rng: np.random.Generator) -> Pairs:
    """Any pairs, the same one perhaps twice and in both directions."""
    if count < 2:
        return []
    drawn = rng.integers(0, count, (int(rng.integers(0, 2 * count)), 2))
    return [(int(u), int(v)) for u, v in drawn if u != v]


SHAPES = (_chain, _cycle, _star, _clique, _scattered)


# -- known answers -------------------------------------------------------------------------------


def _potts(count: int, colors: int, pairs: Pairs, wish: Floats) -> Problem:
    """Neighbors pay 1 for being alike."""
    return Problem(
        tuple(wish for _ in range(count)),
        tuple(Edge(u, v, np.eye(colors)) for u, v in pairs),
    )


def _knapsack(limit: float) -> Problem:
    """Four items worth 6, 10, 12, 7 weighing 1, 2, 3, 2: what is left behind is paid."""
    worth, weight = (6.0, 10.0, 12.0, 7.0), (1.0, 2.0, 3.0, 2.0)
    return Problem(
        tuple(np.array([w, 0.0]) for w in worth),
        (),
        tuple(Usage(i, 0, 0, np.array([0.0, w])) for i, w in enumerate(weight)),
        limit,
    )


_SQUARE = [(0, 1), (1, 2), (2, 3), (3, 0)]
_K4 = list(itertools.combinations(range(4), 2))
_ZERO2, _ZERO3 = np.zeros(2), np.zeros(3)

# name -> problem, seconds of the best answer (None where nothing fits)
KNOWN: dict[str, tuple[Problem, float | None]] = {
    "one node": (Problem((np.array([3.0, 1.0, 2.0]),), ()), 1.0),
    "two that agree": (
        Problem((np.array([0.0, 5.0]), np.array([5.0, 0.0])), (Edge(0, 1, 8 - 8 * np.eye(2)),)),
        5.0,
    ),
    "even cycle takes two colors": (_potts(4, 2, _SQUARE, _ZERO2), 0.0),
    "triangle with two colors": (_potts(3, 2, [(0, 1), (1, 2), (2, 0)], _ZERO2), 1.0),
    "four in a clique with three colors": (_potts(4, 3, _K4, _ZERO3), 1.0),
    "four in a clique with two colors": (_potts(4, 2, _K4, _ZERO2), 2.0),
    "five in a clique with two colors": (
        _potts(5, 2, list(itertools.combinations(range(5), 2)), _ZERO2), 4.0,
    ),
    "knapsack of 5": (_knapsack(5.0), 12.0),
    "knapsack of 8": (_knapsack(8.0), 0.0),
    "knapsack of nothing": (_knapsack(0.5), 35.0),
    "too small for anything": (
        Problem((np.zeros(2),), (), (Usage(0, 0, 3, np.array([9.0, 7.0])),), 6.0), None,
    ),
    "two at once do not fit, one after the other do": (
        Problem(
            (np.array([0.0, 4.0]),) * 2, (),
            (Usage(0, 0, 1, np.array([6.0, 1.0])), Usage(1, 1, 2, np.array([6.0, 1.0]))), 10.0,
        ),
        4.0,
    ),
    "no nodes": (Problem((), ()), 0.0),
}  # fmt: skip
