"""A problem over fewer choices, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.passes.shard.problem import Edge, Problem, Usage


@dataclass(frozen=True)
class Narrowed:
    """The problem over the choices that are left, and for each node which old ones they are."""

    problem: Problem
    left: tuple[npt.NDArray[np.int64], ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same assignment in the old numbering."""
        return tuple(int(keep[c]) for keep, c in zip(self.left, choice, strict=True))


def narrow(problem: Problem, left: Sequence[npt.NDArray[np.int64]]) -> Narrowed:
    """Keep only the choices listed for each node."""
    costs = tuple(c[k] for c, k in zip(problem.costs, left, strict=True))
    edges = tuple(
        Edge(e.left, e.right, e.table[np.ix_(left[e.left], left[e.right])]) for e in problem.edges
    )
    usages = tuple(Usage(u.node, u.first, u.last, u.nbytes[left[u.node]]) for u in problem.usages)
    return Narrowed(replace(problem, costs=costs, edges=edges, usages=usages), tuple(left))
