"""The search of what is not solved at once: a bound that rises and an answer that falls.

    seconds
      |\\
      | \\___                     the best assignment that fits: local search
      |     \\________
      |      ________ <- gap
      |  ___/                    the dual bound, with prices on memory
      |_/__________________ work

1. The dual rises (`dual_ascent.py`). After the first step what is read off it is made to fit and
   improved, so that there is an answer early; and again once the prices know more.
2. What the bound rules out is fixed out, the rest shrunk and raised again, while that helps.
3. A small rest goes to integer programming.
4. Blocks are set anew under noise (`local_search.py`): before step 2, where that is to come, for a
   better answer rules out more, and after it until the work is spent.
"""

from __future__ import annotations

import numpy as np

from autopar.passes.shard.solver.dual_ascent import DualAscent, total_cost
from autopar.passes.shard.solver.effort import AbstractMeter
from autopar.passes.shard.solver.local_search import Worker, annealed
from autopar.passes.shard.solver.problem import Csr, CsrForm, Ints, Problem, narrow, to_csr
from autopar.passes.shard.solver.shrink import shrink

_DUAL_SHARE = 0.4  # of the effort, at most, for the dual
_MEND_SHARE = 0.08  # of what is left, for making one start fit
_MENDING = 0.3  # of the dual's share, for all of them
_SOON = 0.02  # and the first of them, which is soon there
_ANNEAL_SHARE = 0.7  # of what is left then, for local search before choices are fixed out
_READS = 100  # steps of the dual before the others
_STARTS = 6  # cheapest assignments that are kept to search from
_BLOCK = 60  # nodes of a block while a start is made to fit
_FIXED_ENTRIES = 240_000  # of tables seen from both ends, up to which choices are fixed out
_WORTH_MORE = 0.7  # of the entries left, for another round of that
_INTEGER_ENTRIES = 8_000  # of what is left then, up to which integer programming is tried
_INTEGER_SHARE = 0.6  # of what is left of the effort then
_QUESTIONS_A_UNIT = 0.2  # that HiGHS may ask for a unit of work
_FEWEST_QUESTIONS = 1e4  # by columns: some twentieth of a second
_OVERHEAD = 5_000  # of a step in Python, in table entries
_CLOSE = 3e-6  # of the cost, the gap at which nothing is left to find
_BINDS = 1e-6  # share of the bound that a row's price must be worth to count
_ROUNDING = 1e-6


class Anytime:
    """A search that may be run on: `best`, `bound` and the price of memory are those so far."""

    def __init__(self, problem: Problem, form: CsrForm, seed: int) -> None:
        self._problem, self._form, self._seed = problem, form, seed
        self._csr: Csr = form.arrays
        self._worker = Worker(self._csr, seed, _BLOCK)
        self._starts: list[tuple[float, Ints]] = []  # the cheapest that fit
        tables = [*problem.costs, *(e.table for e in problem.edges)]
        self._dearest = sum(float(t.max(initial=0.0, where=np.isfinite(t))) for t in tables)
        self._bound = -float("inf")
        self._ascent: DualAscent | None = None
        self._fixed_at = float("inf")  # the gap at which choices were last fixed out

    @property
    def best(self) -> Ints | None:
        """The cheapest assignment that fits."""
        return self._starts[0][1] if self._starts else None

    @property
    def cost(self) -> float:
        """The seconds of the best assignment."""
        return self._starts[0][0] if self._starts else float("inf")

    @property
    def bound(self) -> float:
        """The lower bound on the seconds of all assignments that fit."""
        return max(self._ascent.bound if self._ascent else -np.inf, self._bound)

    @property
    def fits_nowhere(self) -> bool:
        """True if the bound is more than any assignment costs, so that none fits."""
        return self._ascent is not None and self._ascent.bound > self._dearest * (1 + _ROUNDING)

    @property
    def closed(self) -> bool:
        """True if the best answer is as good as proven."""
        return self.cost < float("inf") and self.cost - self.bound <= _CLOSE * abs(self.cost)

    def binding(self) -> tuple[float, tuple[int, ...]]:
        """The saving of one more byte at all times, and the times at which it would be used."""
        if self._ascent is None:
            return 0.0, ()
        prices = self._ascent.prices
        dear = prices * self._csr.slack > _BINDS * max(abs(self.bound), 1e-30)
        price = float(prices[dear].sum()) / self._form.bytes_per_unit
        return price, tuple(int(t) for t in self._form.times[dear])

    def offer(self, choice: Ints, meter: AbstractMeter) -> None:
        """Keep an assignment that fits, if it is among the cheapest."""
        if not self._starts:
            meter.answered()
        cost = total_cost(self._csr, choice)
        if all(cost != other for other, _ in self._starts):
            self._starts.append((cost, choice.copy()))
            self._starts = sorted(self._starts, key=lambda s: s[0])[:_STARTS]

    def know(self, bound: float) -> None:
        """Take over a bound that was proven elsewhere."""
        self._bound = max(self._bound, bound)

    def build(self) -> None:
        """Compile what the search runs, where that is still to be done, and do nothing else."""
        self._worker.run(0, np.zeros(len(self._csr.slack)), 0.0)
        self._dual()

    def run(self, meter: AbstractMeter) -> None:
        """Spend the meter's effort on all steps in turn, or what of it is needed."""
        lightest = _lightest(self._csr)
        self._take(lightest, meter)
        self._rise(meter)
        if self.fits_nowhere:
            return
        if not self._starts:
            self._mend(lightest, meter, 0.5)
        small = len(self._csr.entries) <= _FIXED_ENTRIES and not meter.quick
        if small:
            self._anneal(meter, meter.until(_ANNEAL_SHARE))
            self._fix_out(meter)
        self._anneal(meter, 1.0)

    def _anneal(self, meter: AbstractMeter, until: float) -> None:
        if self._starts and not self.closed:
            starts = [choice for _, choice in self._starts]
            prices = self._dual().prices
            found = annealed(self._csr, prices, starts, self.bound, meter, until, self._seed)
            self.offer(found, meter)

    def _dual(self) -> DualAscent:
        if self._ascent is None:
            self._ascent = DualAscent(self._form)
        return self._ascent

    def _take(self, choice: Ints, meter: AbstractMeter) -> None:
        self._worker.take(choice)
        if self._worker.fits:
            self.offer(self._worker.choice, meter)

    def _rise(self, meter: AbstractMeter) -> None:
        """Raise the dual for its share of the effort; now and then make an assignment of it."""
        ascent = self._dual()
        begin, until = meter.share, meter.until(_DUAL_SHARE)
        mending, steps = 0.0, 0
        for read in ascent.steps():
            meter.spend(ascent.entries_a_step + _OVERHEAD)
            share = meter.share
            steps += 1
            if read.fits:
                self.offer(read.choice, meter)
            elif self.fits_nowhere:
                break
            if steps == 1 or (steps > _READS and mending < _MENDING * (share - begin)):
                # The first prices know little: one answer soon, others when they know more.
                self._mend(read.choice, meter, _SOON if steps == 1 else _MENDING * (until - share))
                mending += meter.share - share
            if meter.share > until or self.closed:
                break
        if not self.closed:
            self._mend(ascent.nearest, meter, _MEND_SHARE)

    def _mend(self, choice: Ints, meter: AbstractMeter, share: float) -> None:
        """Make an assignment fit and improve it, for no more than a share of what is left."""
        until, prices = meter.until(share), self._dual().prices
        scale = abs(self.bound) / len(self._csr.choices)
        self._worker.take(choice)
        if self._worker.mend(prices, scale, meter, until):
            self.offer(self._worker.choice, meter)
            self._worker.descend(prices, meter, until)
            self.offer(self._worker.choice, meter)

    def _fix_out(self, meter: AbstractMeter) -> None:
        """Drop what the bound rules out, and solve the rest: by raising it again, or exactly."""
        if not self._starts or meter.share >= 1:
            return
        cost, best = self._starts[0]
        begun, entries = meter.share, len(self._csr.entries)
        if (
            self.closed
            or entries > _FIXED_ENTRIES
            or cost - self.bound >= self._fixed_at * (1 - _ROUNDING)
        ):
            return
        self._fixed_at = cost - self.bound
        left = self._dual().left_below(cost)
        meter.spend(_DUAL_SHARE * entries)
        if any(c not in few for few, c in zip(left, best, strict=True)):
            return  # by rounding the best itself is out: it is the best
        narrowed = narrow(self._problem, left)
        small = shrink(narrowed.problem)
        form = to_csr(small.problem)
        if not small.possible or form.fits_nowhere:
            return
        rest = Anytime(small.problem, form, self._seed)
        inside = [int((few < c).sum()) for few, c in zip(left, best, strict=True)]
        rest_best = small.shrink(inside)
        if rest_best is not None:
            rest._take(rest_best, meter)
        built = meter.share
        rest._rise(meter)
        # What follows takes some such time once more, and looks at no clock.
        if not rest.closed and rest._starts and meter.share + (built - begun) < 1:
            if len(form.arrays.entries) < _WORTH_MORE * entries:
                rest._fix_out(meter)
            else:
                rest._integer_program(meter)
        self.know(min(rest.bound, cost))
        if rest.best is not None:
            restored = narrowed.restore(small.restore([int(c) for c in rest.best]))
            self.offer(np.array(restored, dtype=np.int64), meter)

    def _integer_program(self, meter: AbstractMeter) -> None:
        """Solve all that there is, or stop after a count of questions with what bound there is."""
        if len(self._csr.entries) // 2 > _INTEGER_ENTRIES or self.best is None:
            return
        from autopar.passes.shard.solver.integer_program import solve_integer_program  # and PuLP

        left = _INTEGER_SHARE * (1 - meter.share) * meter.work
        columns = len(self._csr.entries) // 2 + len(self._csr.costs)
        questions = int(max(left * _QUESTIONS_A_UNIT, _FEWEST_QUESTIONS / columns))
        _, times = self.binding()
        found = solve_integer_program(
            self._problem, tuple(int(c) for c in self.best), times, questions
        )
        meter.spend(1e5 * min(left, questions / _QUESTIONS_A_UNIT))
        self.know(found.bound_seconds)
        if found.choice:
            self._take(np.array(found.choice, dtype=np.int64), meter)


def _lightest(csr: Csr) -> Ints:
    """The assignment whose nodes each take the least share of their rows' slack."""
    found = np.zeros(len(csr.choices) - 1, dtype=np.int64)
    for v in range(len(found)):
        shares = np.zeros(int(csr.choices[v + 1] - csr.choices[v]))
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            at = csr.nbytes_at[h]
            room = max(int(csr.slack[csr.firsts[h] : csr.lasts[h]].min()), 1)
            shares += csr.nbytes[at : at + len(shares)] / room
        found[v] = int(shares.argmin())
    return found
