"""A self-contained HTML page of a plan: no network, no fonts, the same bytes every time."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from autopar.ir.plan import Plan
from autopar.report.html.data import Data, ReportView, plan_summary, report_data
from autopar.report.html.drawings import drawings
from autopar.report.html.figures import FILTERS, Figures
from autopar.report.svg.draw import STYLE


def page(view: ReportView) -> str:
    """The page as ASCII; every figure on it is read from the JSON object that it ends with."""
    data = report_data(view)
    script = _resource("script.js")
    text = (
        environment()
        .get_template("page.html.j2")
        .render(
            **data,
            figure=Figures(data).figure,
            drawings=drawings(view),
            style=Markup(STYLE + _resource("style.css")),
            script=Markup(script),
            script_hash=_hash(script),
            embedded=_embedded(data),
        )
    )
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def environment() -> Environment:
    """Jinja with everything escaped, nothing undefined passed over, and our filters."""
    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_resource),
    )
    made.filters.update(FILTERS)
    return made


def _resource(name: str) -> str:
    return (files("autopar.report.html") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The hash by which the page's policy knows its own script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(data: Data) -> Markup:
    """The data as JSON that may stand inside a script element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# -- a card for notebooks --------------------------------------------------------------------------

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
