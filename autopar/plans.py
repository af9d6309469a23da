"""The front door of saved plans: load, save, look into and compare them.

It needs neither JAX, the step nor a solver: `autopar.api` is the door of steps, `autopar.reasons`
that of what is solved again, `autopar.pages` that of reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.gc_pause import paused_collection
from autopar.inspecting.compare import compare as compare
from autopar.inspecting.inspect import inspect as inspect_opened
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.inspection import INSPECTED, InspectedPart, Inspection
from autopar.ir.plan import Plan
from autopar.ir.plan_file import a_plan, load_plan, save_plan


def load(path: str | Path) -> Plan:
    """Read a saved plan; raises PlanFileError where the file is damaged."""
    return load_plan(path)


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON: whole, or not at all."""
    save_plan(a_plan(plan), path)


def inspect(plan: Plan, parts: Sequence[InspectedPart] = INSPECTED) -> Inspection:
    """Tell what a plan means, op by op and over time; raises PlanError if it keeps no step.

    With some `parts` alone, as "axes", the others are empty: the fewer, the sooner it is told.
    """
    with paused_collection():
        return inspect_opened(reopen(a_plan(plan)), parts)
