# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The sharding problem as an integer program, in PuLP over HiGHS, or CBC where that is missing.

x[v,c] is 1 where node v takes choice c; e[u,v,r,s] is 1 where u takes a choice of the group r and v
one of the group s, a group being the choices whose rows of the table are alike:

    minimize    sum x[v,c] cost[v,c]  +  sum e[u,v,r,s] table[u,v,r,s]
    (1)         sum_c x[v,c] = 1                                          for every node
    (2)         sum_s e[u,v,r,s] = sum_{c in r} x[u,c], likewise for v    for every edge
    (3)         sum of x[v,c] (bytes[v,c] - least[v]) live at t <= slack  for some times t

Rows (3) are added where an answer breaks them, so that few of a step's many times are ever in the
model; the last answer is then the best of the whole problem.

HiGHS runs in a thread of its own, so that Ctrl-C gets through, and is stopped by a count: it asks
whether to go on at places of its search that do not depend on the time, so that so many questions
are the same work on every machine; its own limits leave out what it does at the root.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pulp

from autopar.errors import SolverError
from autopar.passes.shard.solver.problem import Edge, Floats, Ints, Problem

if TYPE_CHECKING:
    import highspy

_TICK_SECONDS = 0.1  # between looks whether it is done
_PATIENCE_SECONDS = 0.5  # for HiGHS to stop; it does not ask within a large linear program


def run_highs(solver: highspy.Highs, questions: int | None = None) -> int:
    """Solve what the solver holds, until it has asked so often whether to go on.

    Returns how often it asked. Raises what interrupts the caller; HiGHS then stops.
    """
    stop, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []
    asked = 0

    def ask(event: highspy.HighsCallbackEvent) -> None:
        nonlocal asked
        asked += 1
        enough = questions is not None and asked > questions
        if (stop.is_set() or enough) and event.data_in is not None:
            event.data_in.user_interrupt = True

    def run() -> None:
        try:
            solver.run()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    callbacks = solver.cbMipInterrupt, solver.cbSimplexInterrupt
    for callback in callbacks:
        callback.subscribe(ask)
    thread = threading.Thread(target=run, name="HiGHS")
    try:
        thread.start()
        while not done.wait(_TICK_SECONDS):
            pass
    except BaseException:
        stop.set()
        done.wait(_PATIENCE_SECONDS)
        raise
    for callback in callbacks:
        callback.unsubscribe(ask)
    if failed:
        raise failed[0]
    return asked


_UNIT = 1e6  # what the known answer's seconds become: HiGHS works to a fixed number of digits
_CUT = 1.25  # dearer costs are cut to so many times the known answer's: no better one can pay them
_SURE = 1 - 2e-6  # the bound is taken back by what HiGHS may be off
_GAP = 1e-6
_ROUNDS = 30
_FIRST_MARGIN, _MOST_MARGIN = 1e-6, 1e-2  # of the limit, where HiGHS breaks a row it was given
_NODES_A_QUESTION = 0.02  # of CBC, which counts nodes

Terms = list[tuple[pulp.LpVariable, float]]


@dataclass(frozen=True)
class Integer:
    """The best assignment that fits, () for none found, and what any that fits costs at least."""

    choice: tuple[int, ...]
    bound_seconds: float
    proven_infeasible: bool = False
    questions: int = 0  # that HiGHS asked


def solve_integer_program(
    problem: Problem,
    known: Sequence[int] = (),
    times: Sequence[int] = (),
    questions: int | None = None,
    solvers: Sequence[str] = ("highs", "cbc"),
) -> Integer:
    """The best assignment, a better one than the `known`, or none within so many questions.

    Memory is held to its limit at the given `times` from the start. Raises SolverError where no
    solver is installed.
    """
    held = list(times)
    bound, margin, left = -float("inf"), 0.0, questions
    for _ in range(_ROUNDS):
        model = _Model(problem, known)
        model.one_choice()
        model.tie_edges()
        model.hold_memory(held, margin)
        answer = model.solve(_solver(left, solvers))
        left = left if left is None else left - answer.questions
        if answer.proven_infeasible:
            return Integer((), float("inf") if not margin else bound, not margin)
        if not margin:
            bound = max(bound, answer.bound_seconds)
        if not answer.choice or problem.fits(answer.choice):
            return replace(answer, bound_seconds=bound)
        fresh = [t for t in problem.worst_times(answer.choice) if t not in held]
        if not fresh:  # by the solver's tolerance: the limit is drawn in
            margin = max(10 * margin, _FIRST_MARGIN)
            if margin > _MOST_MARGIN:
                break
        held += fresh
        if left is not None and left <= 0:
            break
    return Integer((), bound)


class _Model:
    """The PuLP model while it is built."""

    def __init__(self, problem: Problem, known: Sequence[int]) -> None:
        self._problem = problem
        tables = [*problem.costs, *(e.table for e in problem.edges)]
        finite = [np.abs(t[np.isfinite(t)]) for t in tables]
        dearest = sum(float(t.max(initial=0.0)) for t in finite)
        seconds = problem.seconds(known) if known else float("inf")
        # Not the `forbidden_cost` of the other searches: HiGHS needs numbers of like size.
        cut = min(float(t.min(initial=0.0)) for t in tables) >= 0 and 0 < seconds < float("inf")
        self._most = _CUT * seconds if cut else 1.0 + 2.0 * dearest
        self._scale = _UNIT / (seconds if cut else max(dearest, 1e-30))
        self._model = pulp.LpProblem("sharding", pulp.LpMinimize)
        self._picks = [
            [self._model.add_variable(f"x{v}_{c}", cat="Binary") for c in range(len(cost))]
            for v, cost in enumerate(problem.costs)
        ]
        self._goal: Terms = [
            (x, weight)
            for row, cost in zip(self._picks, problem.costs, strict=True)
            for x, weight in zip(row, self._weights(cost), strict=True)
        ]

    def _weights(self, seconds: Floats) -> list[float]:
        weights: list[float] = (np.minimum(seconds, self._most) * self._scale).tolist()
        return weights

    def one_choice(self) -> None:
        """Add rows (1)."""
        for row in self._picks:
            self._model += pulp.LpAffineExpression([(x, 1) for x in row]) == 1

    def tie_edges(self) -> None:
        """Add the edges' variables with rows (2)."""
        for i, edge in enumerate(self._problem.edges):
            self._tie(i, edge)

    def _tie(self, index: int, edge: Edge) -> None:
        table = np.minimum(edge.table, self._most)
        rows, columns = _alike_rows(table), _alike_rows(table.T)
        few = table[np.ix_([r[0] for r in rows], [c[0] for c in columns])]
        pairs = [
            [self._model.add_variable(f"e{index}_{r}_{c}", 0.0) for c in range(len(columns))]
            for r in range(len(rows))
        ]
        for variables, weights in zip(pairs, few, strict=True):
            self._goal += zip(variables, self._weights(weights), strict=True)
        for r, members in enumerate(rows):
            self._equal(pairs[r], [self._picks[edge.left][m] for m in members])
        for c, members in enumerate(columns):
            self._equal([row[c] for row in pairs], [self._picks[edge.right][m] for m in members])

    def _equal(self, pairs: list[pulp.LpVariable], picks: list[pulp.LpVariable]) -> None:
        terms = [(e, 1) for e in pairs] + [(x, -1) for x in picks]
        self._model += pulp.LpAffineExpression(terms) == 0

    def hold_memory(self, times: Sequence[int], margin: float) -> None:
        """Add rows (3), in thousandths of the slack: a row may be off by some 1e-7 of its unit."""
        limit = self._problem.limit_bytes * (1 - margin)
        for t in times:
            live = [u for u in self._problem.usages if u.first <= t <= u.last]
            slack = limit - sum(float(u.nbytes.min()) for u in live)
            unit = max(slack, 1.0) / 1e3
            terms: dict[pulp.LpVariable, float] = {}
            for u in live:
                extra: list[float] = ((u.nbytes - u.nbytes.min()) / unit).tolist()
                for x, weight in zip(self._picks[u.node], extra, strict=True):
                    terms[x] = terms.get(x, 0.0) + weight
            self._model += pulp.LpAffineExpression(terms) <= slack / unit

    def solve(self, solver: pulp.LpSolver) -> Integer:
        """The answer of the solver, memory being held at the times added so far."""
        self._model.setObjective(pulp.LpAffineExpression(self._goal))
        status = self._model.solve(solver)
        if status == pulp.LpStatusInfeasible:
            return Integer((), float("inf"), True)
        values: list[list[Any]] = [[x.value() for x in row] for row in self._picks]
        choice: tuple[int, ...] = ()
        if all(value is not None for row in values for value in row):
            choice = tuple(int(np.argmax(np.asarray(row, dtype=float))) for row in values)
            if not np.isclose([float(max(row)) for row in values], 1.0, atol=0.1).all():
                choice = ()  # stopped before there was one
        if isinstance(solver, _Highs):
            highs = cast("highspy.Highs", self._model.solverModel)
            bound = float(highs.getInfo().mip_dual_bound) / self._scale * _SURE
        else:
            proven = self._model.sol_status == pulp.LpSolutionOptimal and bool(choice)
            bound = self._problem.seconds(choice) * _SURE if proven else -float("inf")
        if choice and not np.isfinite(self._problem.seconds(choice)):
            choice = ()  # all that is left is forbidden
        asked = solver.asked if isinstance(solver, _Highs) else 0
        return Integer(choice, bound, False, asked)


def _alike_rows(table: Floats) -> list[Ints]:
    """The rows of a table in groups of equal ones, which share their edges' variables."""
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.ascontiguousarray(table)):
        groups.setdefault(row.tobytes(), []).append(i)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS as PuLP calls it, but so that Ctrl-C gets through and a count of questions ends it."""

    questions: int | None = None
    asked: int = 0

    def callSolver(self, lp: pulp.LpProblem) -> None:  # PuLP's name for it
        self.asked = run_highs(cast("highspy.Highs", lp.solverModel), self.questions)


def _solver(questions: int | None, solvers: Sequence[str]) -> pulp.LpSolver:
    for name in solvers:
        with warnings.catch_warnings():  # PuLP 4 will have CBC under another name
            warnings.simplefilter("ignore", DeprecationWarning)
            if name == "highs":
                solver = _Highs(msg=False, threads=1, gapRel=_GAP)
                solver.questions = questions
            else:
                nodes = None if questions is None else max(int(questions * _NODES_A_QUESTION), 1)
                solver = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=_GAP, maxNodes=nodes)
        if solver.available():
            return solver
    raise SolverError("neither HiGHS nor CBC is installed: pip install highspy")
