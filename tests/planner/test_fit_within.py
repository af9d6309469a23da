"""The loop that keeps the memory limit: it moves what is allowed by what the listing is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.planner.fit_within import fit_within, fits


@dataclass(frozen=True)
class FakePlan:
    peak_bytes: int
    seconds: float
    cost: float = 0.0


@dataclass
class Solver:
    """Answers with what `plan` makes of an allowance, and remembers what was allowed."""

    plan: Callable[[int], FakePlan | None]

    def __post_init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, allowed: int) -> FakePlan | None:
        self.asked.append(allowed)
        return self.plan(allowed)


def unasked(_: int) -> FakePlan:
    raise AssertionError("nobody asked for it")


def test_a_plan_made_without_a_limit_that_keeps_it_is_the_answer() -> None:
    solver = Solver(lambda allowed: None)
    roomy = [FakePlan(1100, 1.0), FakePlan(900, 3.0), FakePlan(100, 2.0)]
    fit = fit_within(1000, solver, roomy, lightest=map(unasked, [0]))
    assert fit.best == roomy[1]
    assert solver.asked == []


def test_what_the_listing_holds_more_than_was_counted_is_taken_off_the_allowance() -> None:
    solver = Solver(lambda allowed: FakePlan(allowed + 300, 1.0))
    fit = fit_within(1000, solver, lightest=map(unasked, [0]))
    assert fit.best == FakePlan(1000, 1.0)
    assert solver.asked == [1000, 700]


def test_the_allowance_falls_ever_faster_while_it_makes_no_difference() -> None:
    solver = Solver(lambda allowed: FakePlan(1001 if allowed > 300 else 400, 1.0, cost=2.0))
    fit = fit_within(1000, solver, [FakePlan(3000, 0.5, cost=0.5)])
    assert solver.asked == [1000, 985, 955, 895, 775, 535]  # by 15, 30, 60 ...
    assert fit.best is None


def test_no_allowance_is_tried_that_has_the_same_plan() -> None:
    solver = Solver(lambda allowed: FakePlan(1001 if allowed > 300 else 400, 1.0, cost=2.0))
    roomy = FakePlan(3000, 0.5, cost=0.5)
    fit = fit_within(1000, solver, [roomy], counted=lambda plan: 301.0)
    assert solver.asked[:2] == [1000, 300]
    assert fit.best == FakePlan(400, 1.0, cost=2.0)


def test_room_that_is_left_is_given_where_the_limit_costs_seconds() -> None:
    roomy = FakePlan(2000, 1.0, cost=1.0)
    solver = Solver(lambda allowed: FakePlan(allowed - 400, 3000 / allowed, cost=3000 / allowed))
    fit = fit_within(1000, solver, [roomy])
    assert solver.asked == [1000, 1400]
    assert fit.best == FakePlan(1000, 3000 / 1400, cost=3000 / 1400)


def test_no_more_room_is_asked_for_than_is_counted_of_the_plan_without_a_limit() -> None:
    """From 1100 on the answer is that plan, which holds too much: half the way is no other."""
    roomy = FakePlan(1050, 1.0, cost=1.0)
    solver = Solver(lambda allowed: FakePlan(600, 2.0, cost=2.0) if allowed < 1100 else roomy)
    fit = fit_within(1000, solver, [roomy], counted=lambda plan: 1100.0 if plan is roomy else 950.0)
    assert solver.asked == [1000]
    assert fit.best == FakePlan(600, 2.0, cost=2.0)


def test_half_the_way_to_what_is_counted_of_the_plan_without_a_limit_is_tried() -> None:
    roomy = FakePlan(1900, 1.0, cost=1.0)
    solver = Solver(lambda allowed: FakePlan(allowed - 500, 2.0, cost=2.0))
    fit_within(1000, solver, [roomy], counted=lambda plan: 1400.0 if plan is roomy else 950.0)
    assert solver.asked == [1000, 1200]


def test_no_more_room_is_asked_for_where_the_limit_costs_nothing() -> None:
    solver = Solver(lambda allowed: FakePlan(100, 1.0, cost=1.004))
    fit = fit_within(1000, solver, [FakePlan(2000, 1.0, cost=1.0)])
    assert fit.best == FakePlan(100, 1.0, cost=1.004)
    assert solver.asked == [1000]


def test_an_allowance_that_gave_too_much_is_not_asked_again() -> None:
    """At 1000 it is over by 200; at 800 there is room, and half the way back is tried."""
    solver = Solver(lambda allowed: FakePlan(1200 if allowed > 850 else 500, 1.0, cost=2.0))
    fit = fit_within(1000, solver, [FakePlan(3000, 0.5, cost=0.5)])
    assert solver.asked == [1000, 800, 900]
    assert fit.best == FakePlan(500, 1.0, cost=2.0)


def test_what_holds_the_least_is_the_last_resort() -> None:
    solver = Solver(lambda allowed: None)
    lightest = FakePlan(990, 9.0)
    assert fit_within(1000, solver, lightest=[None, lightest]).best == lightest


def test_the_fewest_bytes_of_all_that_was_tried_are_told_where_nothing_fits() -> None:
    solver = Solver(lambda allowed: FakePlan(1500, 1.0) if allowed == 1000 else None)
    fit = fit_within(1000, solver, [FakePlan(2000, 1.0)], lightest=[FakePlan(1200, 9.0)])
    assert fit.best is None
    assert fit.fewest_bytes == 1200
    assert not fits(FakePlan(1200, 9.0), 1000)
