"""A plan as a small card for notebooks: no script, and styles that reach nothing else."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.report.html.data import plan_summary
from autopar.report.html.figures import Figures
from autopar.report.html.page import environment

_ROWS = 6


def html_summary(plan: Plan) -> str:
    """The plan's headline, its largest arguments and its collectives, as ASCII HTML."""
    data = plan_summary(plan)
    text = (
        environment()
        .get_template("card.html.j2")
        .render(plan=data, rows=_ROWS, figure=Figures({"plan": data}).figure)
    )
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")
