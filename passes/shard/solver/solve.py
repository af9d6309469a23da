"""Solves a sharding problem: the cheapest assignment that fits, and how far it may be off.

1. Shrink (`shrink.py`): nodes that follow others join them, choices that lose go. Exact.
2. A narrow graph, as a step of some layers is, is solved by branch and bound over the elimination
   order (`branch_and_bound.py`), nearly always exactly.
3. Else a first answer (`heuristic.py`): the best without memory, by elimination. If it fits it is
   the answer; if not, a price on bytes makes one that fits, and bounds all others.
4. Then the dual and local search take turns (`anytime.py`), with more work while the gap is wide.
   A start that is known from elsewhere is asked for where little work does not prove an answer.

Steps 1 to 3 are numpy alone: small problems do not wait for numba.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.ir.sharding_plan import Status
from autopar.passes.shard.solver.branch_and_bound import LABELS, branch_and_bound
from autopar.passes.shard.solver.effort import (
    FULL,
    AbstractDeadline,
    AbstractMeter,
    Effort,
    WorkMeter,
)
from autopar.passes.shard.solver.heuristic import first_answer, mended_answers
from autopar.passes.shard.solver.problem import Problem, to_csr
from autopar.passes.shard.solver.shrink import shrink

_PROVEN = 1e-5  # of the seconds, the gap at which an answer counts as the best
_CLOSE = 3e-6
_GUESSED_EDGES = 5_000  # past which the first answer is left to the dual
# Units of work a thousand edge entries, and at least, in turn while the gap is wide.
_LEVELS = ((1, 60), (4, 100), (8, 200), (20, 300), (48, 400))
# Where memory binds a level is followed by another if it saves so much of the seconds, or closes so
# much of the gap.
_WORTH_SECONDS, _WORTH_GAP = 1e-3, 0.25
_UNAIDED = 3  # levels that mostly prove an answer where memory does not bind, and need no start
_GOOD_GAP = 0.01  # at which no more work is spent where memory binds: the bound is seldom tight
_MOST = 1_000_000  # entries for which work is given
_QUICK_LABELS = LABELS[:2]  # with more, a quick effort would take seconds over a few problems
_FAIR_GAP = 0.04  # and where branch and bound has an answer, which is seldom bettered


Start = Callable[[], Sequence[int]]  # an assignment to start from, () for none


@dataclass(frozen=True)
class Solution:
    """A full assignment with its seconds, a lower bound and how it was found; () if none was.

    `proven_infeasible` says that nothing can fit. The price is what a byte more would save, at the
    binding times together: 0 where memory does not bind.
    """

    choice: tuple[int, ...]
    seconds: float
    bound_seconds: float
    status: Status
    sentence: str
    proven_infeasible: bool = False
    memory_price_seconds_per_byte: float = 0.0
    binding_times: tuple[int, ...] = ()

    @property
    def feasible(self) -> bool:
        """True if anything fits."""
        return self.seconds < float("inf")

    @property
    def gap(self) -> float:
        """The share of the seconds that is not proven; all of it where there is no answer."""
        if not self.feasible:
            return 1.0
        return max(0.0, self.seconds - self.bound_seconds) / max(abs(self.seconds), 1e-30)


def solve(
    problem: Problem,
    start: Start | None = None,
    effort: Effort = FULL,
    seed: int = 0,
    deadline: AbstractDeadline | None = None,
) -> Solution:
    """The cheapest assignment that fits, and never a dearer one than a `start` that fits.

    The start is asked for where the best is not soon found: to find one may take as long. Without a
    deadline the same problem and seed give the same answer on every machine; with one the effort is
    what there is time for. A quick effort takes the first good answer.
    """
    if not problem.costs:
        return Solution((), 0.0, 0.0, Status.FIXED, "Nothing to decide.")
    small = shrink(problem)

    @cache
    def known() -> tuple[int, ...]:
        choice = tuple(start()) if start is not None else ()
        return choice if choice and problem.fits(choice) else ()

    @cache
    def known_inside() -> tuple[int, ...]:
        inside = small.shrink(known()) if known() else None
        return tuple(int(c) for c in inside) if inside is not None else ()

    search = _Search(small.problem, effort, seed, deadline, known_inside)
    if small.possible:
        search.branch()
    else:
        search.infeasible = True
    if not search.closed:
        search.run()
    choice = small.restore(search.choice) if search.choice else ()
    if not search.closed and known():
        if not (choice and problem.seconds(choice) < problem.seconds(known())):
            choice = known()
    return _solution(problem, choice, search)


def _solution(problem: Problem, choice: tuple[int, ...], search: _Search) -> Solution:
    """The answer in the whole problem's terms, with a sentence that says how sure it is."""
    if not choice:
        sentence = "No assignment fits."
        if not search.infeasible:
            sentence = "No assignment that fits was found; it is not proven that there is none."
        endless = float("inf")
        return Solution((), endless, endless, Status.FEASIBLE, sentence, search.infeasible)
    seconds = problem.seconds(choice)
    bound = min(search.bound, seconds)
    proven = seconds - bound <= _PROVEN * seconds
    held = f", with memory limits at {len(search.times)} moments" if search.times else ""
    return Solution(
        choice,
        seconds,
        bound,
        Status.OPTIMAL if proven else Status.FEASIBLE,
        f"{'Solved exactly' if proven else 'The best found'}{held}.",
        memory_price_seconds_per_byte=search.price,
        binding_times=search.times,
    )


class _Search:
    """The steps on the shrunk problem: the best answer, the bound and the price so far."""

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        seed: int,
        deadline: AbstractDeadline | None,
        start: Callable[[], tuple[int, ...]],
    ) -> None:
        self._problem, self._effort, self._seed, self._deadline = problem, effort, seed, deadline
        self._entries = sum(e.table.size for e in problem.edges)
        self._start = start
        self.choice: tuple[int, ...] = ()
        self._seconds = float("inf")
        self.bound = -float("inf")
        self.infeasible = False
        self._good_gap = _GOOD_GAP
        self.price, self.times = 0.0, tuple[int, ...]()

    @property
    def closed(self) -> bool:
        """True if the answer is proven, or that there is none."""
        gap = self._seconds - self.bound
        return self.infeasible or (bool(self.choice) and gap <= _CLOSE * abs(self._seconds))

    @property
    def _unaided(self) -> int:
        """The number of levels of work before a start is asked for."""
        in_levels = self._deadline is None and self._effort.work is None and not self._effort.quick
        may_close = in_levels and not self._problem.usages and self._entries <= _MOST
        return _UNAIDED if may_close else 0

    @property
    def _is_over(self) -> bool:
        return self._deadline is not None and self._deadline.is_over

    def take(self, choice: tuple[int, ...], bound: float) -> None:
        """Keep an answer, () for none, if it fits and is better; and a bound."""
        self.bound = max(self.bound, bound)
        if not choice or not self._problem.fits(choice):
            return
        seconds = self._problem.seconds(choice)
        if seconds < self._seconds:
            if not self.choice and self._deadline is not None:
                self._deadline.answered()
            self.choice, self._seconds = choice, seconds

    def branch(self) -> None:
        """Step 2: the best of a narrow graph."""
        if self._problem.fits_nowhere:
            self.infeasible = True
        elif len(self._problem.edges) <= _GUESSED_EDGES:  # else it is not narrow
            labels = _QUICK_LABELS if self._effort.quick else LABELS
            found = branch_and_bound(self._problem, labels=labels)
            self._good_gap = _FAIR_GAP if found.choice else _GOOD_GAP
            self.take(found.choice, found.bound_seconds)
            self.infeasible = found.proven and not found.choice
            self.price, self.times = found.seconds_per_byte, found.binding_times

    def run(self) -> None:
        """Steps 3 and 4, until the answer is proven or the effort is spent."""
        if not self._unaided:
            self.take(self._start(), -float("inf"))
        # Beside an unproven answer of branch and bound too: the search goes on from the better one.
        if len(self._problem.edges) <= _GUESSED_EDGES:
            self._guess()
        if not self.closed and not self._is_over:
            self._take_turns()

    def _guess(self) -> None:
        """Step 3: a first answer, which is the best one where memory does not bind."""
        if self._deadline is not None:
            for choice in mended_answers(self._problem):
                self.take(choice, -float("inf"))
                if self._is_over:
                    return
        first = first_answer(self._problem)
        self.take(first.choice, first.bound_seconds)
        self.price, self.times = first.seconds_per_byte, first.binding_times
        if not self.choice:
            for choice in mended_answers(self._problem):
                self.take(choice, -float("inf"))

    def _take_turns(self) -> None:
        """Step 4, with the work that is asked for or in levels while the gap is wide."""
        form = to_csr(self._problem)
        if form.fits_nowhere:
            self.infeasible = True
            return

        def build() -> None:
            from autopar.passes.shard.solver.anytime import Anytime

            Anytime(self._problem, form, self._seed).build()

        # A busy machine may take minutes to compile what follows: then the first answer has to do.
        if self._deadline is not None and not self._deadline.builds(build):
            return
        from autopar.passes.shard.solver.anytime import Anytime  # it brings numba along

        anytime = Anytime(self._problem, form, self._seed)
        for level, meter in self._meters():
            if level >= self._unaided:
                self.take(self._start(), -float("inf"))
            if self.choice:
                anytime.offer(np.array(self.choice, dtype=np.int64), meter)
            anytime.know(self.bound)
            anytime.run(meter)
            best = anytime.best
            self.take(tuple(int(c) for c in best) if best is not None else (), anytime.bound)
            self.infeasible = anytime.fits_nowhere
            self.price, self.times = anytime.binding()
            if self.closed:
                break

    def _meters(self) -> Iterator[tuple[int, AbstractMeter]]:
        """The meter of the deadline, or of the work asked for; else one for each level of work.

        There is a next level as long as the gap is wide and, where memory binds, the last one has
        brought something. Without limits work is what proves an answer.
        """
        if self._deadline is not None:
            yield 0, self._deadline.meter()
            return
        if self._effort.work is not None:
            yield 0, WorkMeter(self._effort.work, self._effort.quick)
            return
        seconds = gap = float("inf")  # before the last level
        for i, (rate, least) in enumerate(_LEVELS[:1] if self._effort.quick else _LEVELS):
            saved = self._seconds <= seconds * (1 - _WORTH_SECONDS)
            closed = self._seconds - self.bound <= gap * (1 - _WORTH_GAP)
            seconds, gap = self._seconds, self._seconds - self.bound
            good = self._good_gap if self.price > 0 or i >= _UNAIDED else _PROVEN
            if i and self.choice and gap <= good * seconds:
                return
            if i > 1 and self.price > 0 and not (saved or closed):
                return
            work = max(int(rate * min(self._entries, _MOST) / 1e3), least)
            yield i, WorkMeter(work, self._effort.quick)
