"""The front door of reports: a plan as one HTML page, with neither JAX nor the step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from autopar.errors import InputError
from autopar.ir.codec import Json
from autopar.ir.plan import Plan
from autopar.ir.plan_file import a_plan
from autopar.ir.text_file import write_text
from autopar.ir.verification import Verification, verification_data
from autopar.plans import inspect
from autopar.report.html.data import OtherPlan, ReportView
from autopar.report.html.page import page
from autopar.report.trace import load_trace


def write_report(
    plan: Plan,
    path: str | Path,
    *,
    against: Mapping[str, Plan] | None = None,
    trace: str | Path | None = None,
    verification: Verification | dict[str, Json] | None = None,
) -> None:
    """Write a plan as one HTML page that needs no network: whole, or not at all.

    `against` are other plans by name, `trace` what `ParallelStep.trace` wrote, `verification` what
    `verify` found, or its JSON. Raises InputError where the trace cannot be used.
    """
    if trace is not None and a_plan(plan).is_one_program:
        raise InputError(
            f"{plan.origin.step} is one program, which has no schedule to draw a trace beside"
        )
    if isinstance(verification, Verification):
        verification = verification_data(verification)
    view = ReportView(
        plan=a_plan(plan),
        inspection=inspect(plan),
        made_by=f"autopar {version('autopar')}",
        others=tuple(OtherPlan(name, other) for name, other in (against or {}).items()),
        measured=load_trace(Path(trace)) if trace is not None else (),
        verification=verification,
    )
    write_text(page(view).encode("ascii", "xmlcharrefreplace").decode(), path)
