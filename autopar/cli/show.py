"""`autopar show`: a saved plan in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from autopar import plans
from autopar.cli.console import out, print_json
from autopar.errors import InputError
from autopar.ir.inspection import INSPECTED, InspectedPart, Inspection
from autopar.ir.paths import matches
from autopar.ir.plan import Plan
from autopar.report.inspection import axes, collectives_by_kind, communication, modules, ops
from autopar.report.plan import (
    collectives,
    headline,
    margins_line,
    memory,
    memory_in_full,
    parameters,
    pipeline,
)
from autopar.report.rows import inspection_data, plan_data, schedule_data
from autopar.report.style import QUIET
from autopar.schedule.planned import simulation_of

_SHOWN = 12
_NOTHING = Inspection((), (), (), (), (), (), ())
_VIEWS = ("--params", "--ops", "--stages", "--comm", "--memory")


@dataclass(frozen=True)
class Views:
    """The parts of a plan that are asked for; none means a little of everything."""

    params: bool
    ops: bool
    stages: bool
    comm: bool
    memory: bool

    @property
    def is_overview(self) -> bool:
        """True if nothing in particular is asked for."""
        return not any((self.params, self.ops, self.stages, self.comm, self.memory))

    @property
    def inspected(self) -> tuple[InspectedPart, ...]:
        """The parts of an inspection that are shown."""
        if self.is_overview:
            return "axes", "collectives"
        asked: tuple[tuple[bool, InspectedPart], ...] = (
            (self.params, "axes"), (self.ops, "ops"), (self.stages, "modules"),
            (self.comm, "collectives"), (self.memory, "memory"),
        )  # fmt: skip
        return tuple(part for is_asked, part in asked if is_asked)


def show_plan(path: Path, wanted: Views, match: str | None, in_full: bool, as_json: bool) -> None:
    """Print a saved plan, whole or the parts of it that are asked for."""
    plan = plans.load(path)
    looked_into = wanted.ops or wanted.stages or wanted.comm
    shown = INSPECTED if as_json or match is not None else wanted.inspected
    found = _NOTHING if plan.record is None and not looked_into else plans.inspect(plan, shown)
    if as_json:
        schedule = schedule_data(simulation_of(plan)) if not plan.is_one_program else None
        print_json({**plan_data(plan), "inspection": inspection_data(found), "schedule": schedule})
        return
    if match is not None:
        plan, found = _matching(plan, found, match)
    parts = _overview(plan, found) if wanted.is_overview else _parts(plan, found, wanted, in_full)
    console = out()
    for i, part in enumerate(parts):
        if i:
            console.print()
        console.print(part)


def _overview(plan: Plan, found: Inspection) -> Iterator[RenderableType]:
    """A screen or so."""
    yield headline(plan)
    if not plan.is_one_program:
        yield pipeline(plan)
    if found.axes:
        yield axes(found.axes, plan)
    if plan.outcome.recipes:
        yield margins_line(plan)
    yield collectives_by_kind(found, plan) if found.collectives else collectives(plan)
    yield parameters(plan, uses=found.axes)
    yield memory(plan)
    yield Text(f"In full: autopar show PLAN.json with {', '.join(_VIEWS)}", style=QUIET)


def _parts(plan: Plan, found: Inspection, wanted: Views, in_full: bool) -> Iterator[RenderableType]:
    """The parts that were asked for, in full or up to a screen."""
    shown = None if in_full else _SHOWN
    if wanted.params:
        yield parameters(plan, None, found.axes)
    if wanted.ops:
        yield ops(found.ops, shown)
    if wanted.stages:
        if not plan.is_one_program:
            yield pipeline(plan, simulation_of(plan))
        yield modules(found.modules, shown)
    if wanted.comm:
        yield communication(found, plan, shown)
    if wanted.memory:
        yield memory_in_full(plan, found.memory)


def _matching(plan: Plan, found: Inspection, pattern: str) -> tuple[Plan, Inspection]:
    """The plan's arguments, ops and collectives whose path matches; InputError where none does."""
    arguments = tuple(a for a in plan.arguments if matches(pattern, a.path))
    of = tuple(r for r in found.ops if matches(pattern, r.spot.module))
    moved = tuple(
        r for r in found.collectives
        if any(matches(pattern, name) for name in (r.value, r.spot.module, *r.members))
    )  # fmt: skip
    if not (arguments or of or moved):
        raise InputError(f"no argument, op or collective of the plan matches {pattern!r}")
    return replace(plan, arguments=arguments), replace(found, ops=of, collectives=moved)
