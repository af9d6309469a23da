# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Hands a problem to an integer-programming solver through PuLP: HiGHS, or CBC where it is absent.

The model is the one in symbols at the top of `problem.py`: one-choice rows (`_one_choice`), edge
rows that tie e to x (`_tie_edges`), and memory rows at the times asked for (`_hold_memory`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import pulp

from autopar.errors import SolverError
from autopar.passes.shard.solver.problem import Edge, Floats, Problem

if TYPE_CHECKING:
    import highspy

Terms = list[tuple[pulp.LpVariable, float]]


@dataclass(frozen=True)
class IlpAnswer:
    """An assignment with its objective, and the proven lower bound; choice is () if infeasible."""

    choice: tuple[int, ...]
    bound_seconds: float
    optimal: bool

    @property
    def feasible(self) -> bool:
        """True if there is an assignment."""
        return bool(self.choice)


def solve_ilp(
    problem: Problem,
    times: Sequence[int],
    relative_gap: float = 1e-6,
    solvers: Sequence[str] = ("highs", "cbc"),
) -> IlpAnswer:
    """The best assignment, memory being held to its limit at `times` only.

    The first of the solvers that is installed is used. Raises SolverError where none is, or
    where it fails.
    """
    model = _Model(problem)
    model.one_choice()
    model.tie_edges()
    model.hold_memory(times)
    return model.solve(relative_gap, solvers)


class _Model:
    """A PuLP model while it is built; seconds are scaled so that costs are of order one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        largest = max((float(c.max()) for c in problem.costs), default=0.0)
        tables = max((float(e.table.max()) for e in problem.edges), default=0.0)
        self._scale = 1e3 / max(largest, tables, 1e-30)
        self._model = pulp.LpProblem("sharding", pulp.LpMinimize)
        self._picks = [
            [self._model.add_variable(f"x{v}_{c}", cat="Binary") for c in range(len(cost))]
            for v, cost in enumerate(problem.costs)
        ]
        self._goal: Terms = [
            (x, float(w) * self._scale)
            for row, cost in zip(self._picks, problem.costs, strict=True)
            for x, w in zip(row, cost, strict=True)
        ]

    def one_choice(self) -> None:
        """sum_c x[v,c] = 1."""
        for row in self._picks:
            self._model += pulp.LpAffineExpression([(x, 1) for x in row]) == 1

    def tie_edges(self) -> None:
        """sum_d e[u,v,c,d] = x[u,c] and sum_c e[u,v,c,d] = x[v,d]."""
        for i, edge in enumerate(self._problem.edges):
            self._tie(i, edge)

    def _tie(self, index: int, edge: Edge) -> None:
        rows, columns = _alike_rows(edge.table), _alike_rows(edge.table.T)
        pairs = [
            [self._model.add_variable(f"e{index}_{r}_{c}", 0.0) for c in range(len(columns))]
            for r in range(len(rows))
        ]
        for r, members in enumerate(rows):
            left = [(e, 1) for e in pairs[r]] + [(self._picks[edge.left][m], -1) for m in members]
            self._model += pulp.LpAffineExpression(left) == 0
        for c, members in enumerate(columns):
            right = [(pairs[r][c], 1) for r in range(len(rows))]
            right += [(self._picks[edge.right][m], -1) for m in members]
            self._model += pulp.LpAffineExpression(right) == 0
        self._goal += [
            (pairs[r][c], float(edge.table[rows[r][0], columns[c][0]]) * self._scale)
            for r in range(len(rows))
            for c in range(len(columns))
        ]

    def hold_memory(self, times: Sequence[int]) -> None:
        """sum of x[v,c] usage[v,c] live at t <= limit, in thousandths of the limit.

        Solvers let a row be off by about 1e-7 of its unit.
        """
        unit = max(self._problem.limit_bytes, 1.0) / 1e3
        for t in times:
            terms: dict[pulp.LpVariable, float] = {}
            for usage in self._problem.usages:
                if usage.first <= t <= usage.last:
                    for x, held in zip(self._picks[usage.node], usage.nbytes, strict=True):
                        terms[x] = terms.get(x, 0.0) + float(held) / unit
            self._model += pulp.LpAffineExpression(terms) <= self._problem.limit_bytes / unit

    def solve(self, relative_gap: float, solvers: Sequence[str]) -> IlpAnswer:
        self._model.setObjective(pulp.LpAffineExpression(self._goal))
        status = self._model.solve(_solver(relative_gap, solvers))
        if status == pulp.LpStatusInfeasible:
            return IlpAnswer((), float("inf"), True)
        if status != pulp.LpStatusOptimal:
            raise SolverError(f"the ILP solver stopped with {pulp.LpStatus[status]!r}")
        choice = tuple(int(np.argmax([x.value() or 0.0 for x in row])) for row in self._picks)
        seconds = self._problem.seconds(choice)
        return IlpAnswer(choice, seconds * (1 - relative_gap), True)


def _alike_rows(table: Floats) -> list[list[int]]:
    """Rows with equal contents: they share their edge variables."""
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.ascontiguousarray(table)):
        groups.setdefault(row.tobytes(), []).append(i)
    return list(groups.values())


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS as PuLP calls it, but so that Ctrl-C gets through."""

    def callSolver(self, lp: pulp.LpProblem) -> None:  # PuLP's name for it
        from autopar.passes.shard.solver.highs import run_highs  # only where it is installed

        run_highs(cast("highspy.Highs", lp.solverModel))


def _solver(relative_gap: float, solvers: Sequence[str]) -> pulp.LpSolver:
    for name in solvers:
        with warnings.catch_warnings():  # PuLP 4 will have CBC under another name
            warnings.simplefilter("ignore", DeprecationWarning)
            kind = _Highs if name == "highs" else pulp.PULP_CBC_CMD
            solver = kind(msg=False, threads=1, gapRel=relative_gap)
        if solver.available():
            return solver
    raise SolverError("neither HiGHS nor CBC is installed: pip install highspy")
