"""What a page is made of: a plan, what it means, and what there is to put beside it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.codec import Json
from autopar.ir.inspection import Inspection
from autopar.ir.plan import Plan
from autopar.report.trace import TracedSpan


@dataclass(frozen=True)
class OtherPlan:
    """A plan to compare with, and what the page calls it."""

    name: str
    plan: Plan


@dataclass(frozen=True)
class ReportView:
    """All that a page shows; the same view gives the same bytes.

    `measured` are the spans of a step that was traced, `verification` what `autopar verify --json`
    printed; both may be missing. `made_by` is the autopar that draws it, with its version.
    """

    plan: Plan
    inspection: Inspection
    made_by: str
    others: tuple[OtherPlan, ...] = ()
    measured: tuple[TracedSpan, ...] = ()
    verification: dict[str, Json] | None = None
