# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Hands a small flat problem to HiGHS: the model of `flat.py`, with memory rows as they break.

Costs above those of a known answer are cut down to just above it, for no better one can pay them;
HiGHS needs that, as it works with rounded numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from autopar.passes.shard.solver.effort import Meter
from autopar.passes.shard.solver.flat import Flat, Ints
from autopar.passes.shard.solver.highs import run_highs
from autopar.passes.shard.solver.messages import held_rows, total_cost
from autopar.passes.shard.solver.problem import Floats

_UNIT = 1e6  # what the known answer's cost becomes
_CUT = 1.25  # costs are cut to so many times the known answer's
_SURE = 1 - 2e-6  # the bound is taken back by what HiGHS may be off
_GAP = 1e-6
_ROUNDS, _ROWS_A_ROUND = 30, 8
_ITERATIONS_A_UNIT = 10  # of the simplex method, for a unit of work
_QUESTIONS_AN_ITERATION = 0.02
_QUICK = 1e5  # questions of any small problem, by columns: some half a second's


@dataclass(frozen=True)
class Exact:
    """The best assignment that HiGHS found that fits, if any, and its bound."""

    choice: Ints | None
    bound: float


def solve_exactly(flat: Flat, known: Ints, prices: Floats, meter: Meter, until: float) -> Exact:
    """Improve on a known assignment that fits, up to a share of the budget.

    The rows with a price are there from the start, others once an answer breaks them. A cost
    below zero leaves nothing to cut, and the problem as it is.
    """
    cost = total_cost(flat, known)
    best, bound = Exact(None, -np.inf), -np.inf
    if cost <= 0 or min(flat.costs.min(initial=0), flat.entries.min(initial=0)) < 0:
        return best
    model = _Model(flat, cost)
    fresh = np.flatnonzero(prices > 1e-9 * prices.max(initial=0))
    for _ in range(_ROUNDS):
        model.hold(fresh)
        if not model.run(meter, until):
            break
        bound = max(bound, model.bound * _SURE)
        choice = model.choice()
        if choice is None:
            break
        over = held_rows(flat, choice) - flat.slack
        if not (over > 0).any():
            best = Exact(choice, bound)
            break
        fresh = np.array([t for t in _worst(over) if t not in model.held], dtype=np.int64)
        if not fresh.size:
            break
    return Exact(best.choice, bound)


def _worst(over: Ints) -> list[int]:
    """The worst row of each part of the rows that are over."""
    parts = np.array_split(np.flatnonzero(over > 0), _ROWS_A_ROUND)
    return [int(part[over[part].argmax()]) for part in parts if part.size]


def _alike(table: Floats) -> list[Ints]:
    """The rows of a table in groups of equal ones, which share their edges' columns."""
    groups: dict[bytes, list[int]] = {}
    for r, row in enumerate(np.ascontiguousarray(table)):
        groups.setdefault(row.tobytes(), []).append(r)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


class _Model:
    """The model in HiGHS; columns are the nodes' choices, then the edges' pairs of them."""

    def __init__(self, flat: Flat, cost: float) -> None:
        self._flat = flat
        self._scale = cost / _UNIT
        self.held: set[int] = set()
        self._solver = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", _GAP)):
            self._solver.setOptionValue(option, value)
        most = _CUT * _UNIT
        self._count = len(flat.costs)
        self._columns(np.minimum(flat.costs / self._scale, most))
        places = np.arange(self._count, dtype=np.int32)
        kinds = np.full(self._count, highspy.HighsVarType.kInteger)
        self._solver.changeColsIntegrality(self._count, places, kinds)
        for v in range(len(flat.choices) - 1):
            own = np.arange(flat.choices[v], flat.choices[v + 1])
            self._row(own, np.ones(len(own)), 1.0, 1.0)
        for v in range(len(flat.choices) - 1):
            for a in range(flat.arcs[v], flat.arcs[v + 1]):
                if flat.ends[a] > v:
                    self._tie(v, a, most)

    def _columns(self, costs: Floats) -> None:
        count, nothing = len(costs), np.zeros(0, dtype=np.int32)
        starts = np.zeros(count, dtype=np.int32)
        low, high = np.zeros(count), np.ones(count)
        self._solver.addCols(count, costs, low, high, 0, starts, nothing, np.zeros(0))

    def _row(self, columns: Ints, weights: Floats, low: float, high: float) -> None:
        self._solver.addRow(low, high, len(columns), columns.astype(np.int32), weights)

    def _tie(self, v: int, a: int, most: float) -> None:
        """sum_d e[v,w,c,d] = x[v,c] and sum_c e[v,w,c,d] = x[w,d]."""
        flat, w = self._flat, int(self._flat.ends[a])
        wide = int(flat.choices[v + 1] - flat.choices[v])
        high = int(flat.choices[w + 1] - flat.choices[w])
        at, first = int(flat.tables[a]), int(self._solver.getNumCol())
        table = flat.entries[at : at + wide * high].reshape(high, wide) / self._scale
        table = np.minimum(table, most)
        rows, columns = _alike(table), _alike(table.T)
        self._columns(table[np.ix_([r[0] for r in rows], [c[0] for c in columns])].ravel())
        pairs = first + np.arange(len(rows) * len(columns)).reshape(len(rows), len(columns))
        for c, members in enumerate(columns):
            self._equal(pairs[:, c], flat.choices[v] + members)
        for r, members in enumerate(rows):
            self._equal(pairs[r], flat.choices[w] + members)

    def _equal(self, pairs: Ints, choices: Ints) -> None:
        weights = np.concatenate([np.ones(len(pairs)), np.full(len(choices), -1.0)])
        self._row(np.concatenate([pairs, choices]), weights, 0.0, 0.0)

    def hold(self, rows: Ints) -> None:
        """sum of x[v,c] bytes[v,c] over the holders at a row <= its slack, in thousandths."""
        flat = self._flat
        for t in rows:
            self.held.add(int(t))
            weights = np.zeros(self._count)
            unit = max(float(flat.slack[t]), 1.0) / 1e3
            for v in range(len(flat.choices) - 1):
                for h in range(flat.holdings[v], flat.holdings[v + 1]):
                    if flat.firsts[h] <= t < flat.lasts[h]:
                        own = slice(flat.choices[v], flat.choices[v + 1])
                        at, wide = flat.nbytes_at[h], flat.choices[v + 1] - flat.choices[v]
                        weights[own] += flat.nbytes[at : at + wide] / unit
            columns = np.flatnonzero(weights)
            self._row(columns, weights[columns], -highspy.kHighsInf, float(flat.slack[t]) / unit)

    def run(self, meter: Meter, until: float) -> bool:
        """Solve within what is left; whether there is a bound."""
        left = until - meter.share
        if left <= 0:
            return False
        if meter.effort.seconds is not None:
            spent = self._solver.getRunTime()  # its clock runs on from one call to the next
            self._solver.setOptionValue("time_limit", spent + left * meter.effort.seconds)
        questions: int | None = None
        if meter.effort.work is not None:
            most = int(left * meter.effort.work * _ITERATIONS_A_UNIT) + 1
            questions = int(max(most * _QUESTIONS_AN_ITERATION, _QUICK / self._solver.getNumCol()))
        run_highs(self._solver, questions)
        meter.spend(
            1e5 * max(self._solver.getInfo().simplex_iteration_count, 0) / _ITERATIONS_A_UNIT
        )
        return True

    @property
    def bound(self) -> float:
        """The lower bound on the cost of all assignments."""
        return float(self._solver.getInfo().mip_dual_bound) * self._scale

    def choice(self) -> Ints | None:
        """The assignment of the answer, if there is one."""
        if self._solver.getInfo().primal_solution_status != highspy.kSolutionStatusFeasible:
            return None
        values = np.asarray(self._solver.getSolution().col_value[: self._count])
        starts = self._flat.choices
        parts = [values[starts[v] : starts[v + 1]] for v in range(len(starts) - 1)]
        return np.array([int(part.argmax()) for part in parts], dtype=np.int64)
