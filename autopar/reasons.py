"""The front door of a plan's reasons, found by solving it again: no JAX, and not the step."""

from __future__ import annotations

from autopar.errors import ArgumentError, refused
from autopar.gc_pause import paused_collection
from autopar.inspecting.explain import explain as explain_opened
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.explanation import Explanation
from autopar.ir.plan import Plan
from autopar.ir.plan_file import a_plan


def explain(plan: Plan, subject: str) -> Explanation:
    """Why an argument ("params/up") or an op ("dot_general model.py:12") is sharded as it is.

    Raises InputError, with what is near, where the plan has no such thing or several.
    """
    with paused_collection():
        return explain_opened(reopen(a_plan(plan)), _text_of(subject))


def _text_of(subject: object) -> str:
    """The subject; raises ArgumentError where it is no text."""
    if not isinstance(subject, str):
        raise ArgumentError(refused("subject", subject, "a text, as in subject='params/up'"))
    return subject
