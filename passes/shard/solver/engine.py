"""Solves large sharding problems: contract, raise the dual, read answers off it, anneal.

Everything after the exact contraction runs on flat arrays in machine code. The bound is the
dual's: prices on memory and messages along edges, so that memory is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.shard.solver.anneal import Worker, annealed
from autopar.passes.shard.solver.ascent import Ascent
from autopar.passes.shard.solver.bound import bound_problem
from autopar.passes.shard.solver.contract import Contracted, contract
from autopar.passes.shard.solver.effort import Clock, Effort, Meter, no_clock
from autopar.passes.shard.solver.exact import solve_exactly
from autopar.passes.shard.solver.flat import Flat, Flattened, Ints, flatten
from autopar.passes.shard.solver.messages import total_cost
from autopar.passes.shard.solver.problem import Floats, Problem, narrow

_DUAL_SHARE = 0.4  # of the budget, at most, for the dual
_MEND_SHARE = 0.08  # and for making each start fit
_KEPT = 6  # cheapest assignments read off the dual that are kept as starts
_BLOCK = 60
_FIXED_ENTRIES = 240_000  # of tables seen from both ends, up to which choices are fixed out
_EXACT_ENTRIES = 20_000  # of what is left then, up to which integer programming is tried
_SWEEPS = 30  # of the bound by which choices are fixed out
_WORTH_MORE = 0.7  # of the entries left, for another round of that
_EXACT_SHARE = 0.6  # of what is left of the budget then
_READS = 100  # of the dual, before assignments are made of them
_MENDING = 0.3  # of the dual's time, for that
_CLOSE = 3e-6
_ROUNDING = 1e-6
_BINDS = 1e-6  # share of the bound that a row's price must be worth to count
_PRICE_WORK = 300


@dataclass(frozen=True)
class Found:
    """An assignment with its seconds, or () with why; the bound; what a byte more would save."""

    choice: tuple[int, ...]
    seconds: float
    bound_seconds: float
    proven_infeasible: bool = False
    first_seconds: float = float("inf")  # by the clock, when the first answer that fits was there
    seconds_per_byte: float = 0.0
    binding_times: tuple[int, ...] = ()  # those whose bytes have a price

    @property
    def gap(self) -> float:
        """The share of the seconds that is not proven; all of it where there is no answer."""
        if not self.choice:
            return 1.0
        return max(0.0, self.seconds - self.bound_seconds) / max(abs(self.seconds), 1e-30)


def search_problem(
    problem: Problem,
    budget: Effort,
    clock: Clock = no_clock,
    seed: int = 0,
    began: float | None = None,
    start: Sequence[int] | None = None,
) -> Found:
    """The best assignment found within the budget; the time counts from `began` by the clock."""
    meter = Meter(budget, clock, began)
    small = contract(problem)
    if not small.possible:
        return Found((), float("inf"), float("inf"), True)
    flattened = flatten(small.problem)
    if flattened.fits_nowhere:
        return Found((), float("inf"), float("inf"), True)
    hunt = _Hunt(small.problem, flattened, meter, seed)
    if start is not None and problem.fits(start):
        hunt.offer_from(small, start)
    hunt.run()
    if hunt.fits_nowhere:
        return Found((), float("inf"), float("inf"), True)
    price, times = hunt.binding(flattened)
    if hunt.best is None:
        return Found((), float("inf"), hunt.bound, False, float("inf"), price, times)
    choice = small.restore([int(c) for c in hunt.best])
    if start is not None and problem.fits(start):
        choice = min((choice, tuple(start)), key=problem.seconds)
    seconds = problem.seconds(choice)
    bound = min(hunt.bound, seconds)
    return Found(choice, seconds, bound, False, hunt.first_seconds, price, times)


def memory_price(problem: Problem) -> float:
    """Seconds that one more byte of limit would save, by the dual; 0 where memory does not bind."""
    small = contract(problem)
    flattened = flatten(small.problem)
    if not small.possible or flattened.fits_nowhere or not len(flattened.times):
        return 0.0
    hunt = _Hunt(small.problem, flattened, Meter(Effort(work=_PRICE_WORK), no_clock), 0)
    hunt.price()
    return hunt.binding(flattened)[0]


class _Hunt:
    """The search for the best assignment, phase by phase."""

    def __init__(self, problem: Problem, flattened: Flattened, meter: Meter, seed: int) -> None:
        self._problem = problem
        self._flat: Flat = flattened.arrays
        self._times = flattened.times
        self._meter, self._seed = meter, seed
        self._worker = Worker(self._flat, seed, _BLOCK)
        self._starts: list[tuple[float, Ints]] = []  # the cheapest that fit
        tables = [*problem.costs, *(e.table for e in problem.edges)]
        self._dearest = sum(float(t.max(initial=0.0, where=np.isfinite(t))) for t in tables)
        self._ascent = Ascent(flattened)
        self._bound = -float("inf")
        self.first_seconds = float("inf")

    @property
    def bound(self) -> float:
        """Of the dual, or of integer programming."""
        return max(self._ascent.bound, self._bound)

    @property
    def fits_nowhere(self) -> bool:
        """True if the bound is more than any assignment costs, so that none fits."""
        return self._ascent.bound > self._dearest * (1 + _ROUNDING)

    @property
    def prices(self) -> Floats:
        """Of the memory rows, at the best bound."""
        return self._ascent.prices

    @property
    def best(self) -> Ints | None:
        """The cheapest assignment that fits."""
        return self._starts[0][1] if self._starts else None

    @property
    def _close(self) -> bool:
        cost = self._starts[0][0] if self._starts else float("inf")
        return cost < float("inf") and cost - self.bound <= _CLOSE * abs(cost)

    def offer(self, choice: Ints) -> None:
        """Keep an assignment that fits, if it is among the cheapest."""
        if not self._starts:
            self.first_seconds = self._meter.seconds
        cost = total_cost(self._flat, choice)
        if all(cost != other for other, _ in self._starts):
            self._starts.append((cost, choice.copy()))
            self._starts = sorted(self._starts, key=lambda s: s[0])[:_KEPT]

    def offer_from(self, small: Contracted, choice: Sequence[int]) -> None:
        """Keep a whole assignment that fits as one of the contracted problem, if possible."""
        shrunk = small.shrink(choice)
        if shrunk is not None:
            self.offer(shrunk)

    def price(self) -> None:
        """Raise the dual alone."""
        for _ in self._ascent.steps():
            self._meter.spend(self._ascent.entries_a_step + 1000)
            if self._meter.share > 1:
                break

    def binding(self, flattened: Flattened) -> tuple[float, tuple[int, ...]]:
        """The saving of one more byte at all times, and the times at which it would be used."""
        worth = self.prices * self._flat.slack
        dear = worth > _BINDS * max(abs(self.bound), 1e-30)
        price = float(self.prices[dear].sum()) / flattened.bytes_per_unit
        return price, tuple(int(t) for t in flattened.times[dear])

    def run(self) -> None:
        """Raise the dual, make starts of what it says, and anneal from the best of them."""
        if self._meter.effort.seconds is not None:
            self._worker.run(0, self.prices, 0.0)  # compiles where that is still to be done
        self._worker.take(_lightest(self._flat))
        if self._worker.fits:
            self.offer(self._worker.choice)
        self._rise()
        if self.fits_nowhere:
            return
        if not self._close:
            self._mend(self._ascent.nearest, _MEND_SHARE)
        if not self._starts:
            self._mend(_lightest(self._flat), 0.5)
        if self._starts and not self._close:
            self._finish()
        if self._starts and not self._close:
            starts = [choice for _, choice in self._starts]
            prices, bound = self._ascent.prices, self.bound
            self.offer(annealed(self._flat, prices, starts, bound, self._meter, self._seed))

    def _finish(self) -> None:
        """Fix out what the bound rules out, again on the rest while that helps, then solve it.

        Integer programming is exact, or has a better bound.
        """
        cost, best = self._starts[0]
        entries = len(self._flat.entries)
        if not self._meter.effort.exact or entries > _FIXED_ENTRIES:
            return
        left = self._left_below(cost)
        self._meter.spend(_SWEEPS * entries)
        narrowed = narrow(self._problem, left)
        small = contract(narrowed.problem)
        flattened = flatten(small.problem)
        rest = _Hunt(small.problem, flattened, self._meter, self._seed)
        inside = [int((keep < c).sum()) for keep, c in zip(left, best, strict=True)]
        rest.offer_from(small, inside)
        rest._rise()
        if rest._starts and not rest._close:
            if len(rest._flat.entries) < _WORTH_MORE * entries:
                rest._finish()
            else:
                rest._solve()
        self._bound = min(rest.bound, cost)
        for _, found in rest._starts[:1]:
            restored = narrowed.restore(small.restore([int(c) for c in found]))
            self.offer(np.array(restored, dtype=np.int64))

    def _solve(self) -> None:
        """Integer programming on all that there is."""
        if len(self._flat.entries) // 2 > _EXACT_ENTRIES:
            return
        until = self._meter.share + _EXACT_SHARE * (1 - self._meter.share)
        best = self._starts[0][1]
        found = solve_exactly(self._flat, best, self.prices, self._meter, until)
        self._bound = found.bound
        if found.choice is not None:
            self.offer(found.choice)

    def _left_below(self, cost: float) -> tuple[Ints, ...]:
        """By node the choices that may be part of an assignment that fits and costs no more."""
        costs = tuple(self._ascent.priced())
        plain = replace(self._problem, costs=costs, usages=())
        return bound_problem(plain, _SWEEPS, cost + float(self.prices @ self._flat.slack)).left

    def _rise(self) -> None:
        """The dual, for its share of the budget; now and then an assignment is made of it."""
        begin = self._meter.share
        until = begin + _DUAL_SHARE * (1 - begin)
        mending, reads = 0.0, 0
        for read in self._ascent.steps():
            self._meter.spend(self._ascent.entries_a_step)
            share = self._meter.share
            if read.fits:
                self.offer(read.choice)
            elif self.fits_nowhere:
                break
            reads += 1
            if reads > _READS and mending < _MENDING * (share - begin):
                self._mend(read.choice, _MENDING * (until - share))
                mending += self._meter.share - share
            if self._meter.share > until or self._close:
                break

    def _mend(self, choice: Ints, share: float) -> None:
        """Make an assignment fit and improve it, for no more than a share of what is left."""
        until = self._meter.share + share * (1 - self._meter.share)
        scale = abs(self.bound) / len(self._flat.choices)
        self._worker.take(choice)
        if self._worker.mend(self.prices, scale, self._meter, until):
            self.offer(self._worker.choice)
            self._worker.descend(self.prices, self._meter, until)
            self.offer(self._worker.choice)


def _lightest(flat: Flat) -> Ints:
    """The assignment whose nodes each take the least share of their rows' slack."""
    found = np.zeros(len(flat.choices) - 1, dtype=np.int64)
    for v in range(len(found)):
        shares = np.zeros(int(flat.choices[v + 1] - flat.choices[v]))
        for h in range(flat.holdings[v], flat.holdings[v + 1]):
            at = flat.nbytes_at[h]
            room = max(int(flat.slack[flat.firsts[h] : flat.lasts[h]].min()), 1)
            shares += flat.nbytes[at : at + len(shares)] / room
        found[v] = int(shares.argmin())
    return found
