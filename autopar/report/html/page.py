"""A self-contained HTML page of a plan: no network, no fonts, the same bytes every time.

Its drawings are made once each: cluster, schedule, communication, memory, tiles, modules.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from autopar.cluster.planned import planned_cluster
from autopar.ir.inspection import CommRow, MemoryCurve, ModuleRow
from autopar.ir.plan import Plan
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.text import show_bytes, show_count
from autopar.report.html.data import Data, ReportView, mirrored, plan_summary, report_data
from autopar.report.html.figures import FILTERS, Figures, percent, seconds
from autopar.report.inspection import as_tree, places_around
from autopar.report.rows import by_kind
from autopar.report.svg import bars
from autopar.report.svg.draw import STYLE
from autopar.report.svg.gantt import gantt_svg
from autopar.report.svg.memory import memory_svg
from autopar.report.svg.mesh import mesh_svg
from autopar.report.svg.streams import streams_svg
from autopar.report.svg.tiles import tiles_svg
from autopar.schedule.planned import once_seconds_of, simulation_of

MOST_CURVES = 8  # submeshes beyond them are told in the table of stages


@dataclass(frozen=True)
class Drawings:
    """SVG texts; `schedule` is "" where nothing is known of time, `tiles` are by parameter row.

    `memory` has the number of a submesh with each curve, the fullest first.
    """

    mesh: Markup
    schedule: Markup
    communication: Markup
    memory: tuple[tuple[int, Markup], ...]
    tiles: tuple[Markup, ...]
    modules: tuple[Bar, ...]


def drawings(view: ReportView) -> Drawings:
    """The drawings of a view."""
    plan, found = view.plan, view.inspection
    cluster = planned_cluster(plan)
    return Drawings(
        mesh=_inline(mesh_svg(cluster, [s.submesh for s in plan.submeshes])),
        schedule=_inline(_schedule(view)),
        communication=_inline(
            bars.bars_svg(_bars(found.collectives), "collectives by axes and kind")
        ),
        memory=tuple(_memory(found.memory)),
        tiles=tuple(_tiles(plan)),
        modules=icicle(found.modules),
    )


def _inline(svg: str) -> Markup:
    """A drawing as it stands in a page, whose text says µs."""
    return Markup(re.sub(r"(?<=\d) us\b", " &#181;s", svg))


def _schedule(view: ReportView) -> str:
    plan = view.plan
    if plan.is_one_program:
        spans = view.inspection.spans
        return streams_svg(spans, plan.prediction.seconds) if spans else ""
    names = [f"mesh{k}" for k in range(len(plan.submeshes))]
    return gantt_svg(
        simulation_of(plan),
        once_seconds=once_seconds_of(plan),
        step_seconds=plan.prediction.seconds,
        measured=view.measured,
        names=names,
    )


def _memory(curves: tuple[MemoryCurve, ...]) -> Iterator[tuple[int, Markup]]:
    drawn = [c for c in curves if c.levels]  # a step that does nothing has none
    fullest = sorted(drawn, key=lambda c: (-max(x.nbytes for x in c.levels), c.submesh))
    for curve in fullest[:MOST_CURVES]:
        yield curve.submesh, _inline(memory_svg(curve))


def _bars(rows: Sequence[CommRow]) -> Iterator[bars.Bar]:
    """A bar for each kind of collective over the same axes of a submesh."""
    submeshes = sorted({row.submesh for row in rows})
    for submesh in submeshes:
        where = f"mesh{submesh} " if len(submeshes) > 1 else ""
        for (kind, axes), group in by_kind([r for r in rows if r.submesh == submesh]).items():
            exposed, hidden = (c.exposed_seconds for c in group), (c.hidden_seconds for c in group)
            yield bars.Bar(f"{where}{kind} over {'+'.join(axes)}", sum(exposed), sum(hidden))


def _tiles(plan: Plan) -> Iterator[Markup]:
    @cache
    def tile(shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape) -> Markup:
        return _inline(tiles_svg(shape, sharding, mesh, worded=False))

    meshes = [s.mesh for s in plan.submeshes]
    for row, *_ in mirrored(plan):
        yield tile(row.shape, row.sharding, meshes[row.submeshes[0]])


# -- modules as bars within bars -------------------------------------------------------------------

_LEAST = 0.2  # per cent of the width; less cannot be seen
_DEEPEST = 5


@dataclass(frozen=True)
class Bar:
    """A module: its place in per cent of the width, its row from the top, and what to say."""

    left: float
    width: float
    depth: int
    label: str
    title: str


def icicle(modules: Sequence[ModuleRow]) -> tuple[Bar, ...]:
    """A bar for each module that can be seen, inside that of the module around it.

    As wide as all is the whole step, whose path is ""; what cannot be seen is left blank.
    """
    rows = as_tree(modules)
    if not rows or rows[0].path or rows[0].seconds <= 0:
        return ()
    return tuple(_nested_bars(_inside(rows), 0, rows, 0.0, 0))


def _inside(tree: Sequence[ModuleRow]) -> Mapping[int, Sequence[int]]:
    """The places of the modules right inside each, those that take longest first."""
    found: dict[int, list[int]] = {}
    for place, around in enumerate(places_around(tree)):
        if place:  # the whole step comes first
            found.setdefault(around[-1] if around else 0, []).append(place)
    for places in found.values():
        places.sort(key=lambda p: -tree[p].seconds)
    return found


def _nested_bars(
    inside: Mapping[int, Sequence[int]],
    around: int,
    tree: Sequence[ModuleRow],
    left: float,
    depth: int,
) -> Iterator[Bar]:
    for place in inside.get(around, ()):
        module = tree[place]
        width = 100 * module.seconds / tree[0].seconds
        if width < _LEAST:
            return
        name = module.path.removeprefix(f"{tree[around].path}/")
        times = f" \N{MULTIPLICATION SIGN} {module.count}" if module.count > 1 else ""
        many = f"{module.count} times, " if module.count > 1 else ""
        title = (
            f"{module.path}: {many}{seconds(module.seconds)} of a step ({percent(width / 100)}), "
            f"{show_count(module.flops, 'FLOP')}, parameters {show_bytes(module.parameter_bytes)}"
        )
        yield Bar(left, width, depth, f"{name}{times}", title)
        if depth < _DEEPEST:
            yield from _nested_bars(inside, place, tree, left, depth + 1)
        left += width


def page(view: ReportView) -> str:
    """The page as ASCII; every figure on it is read from the JSON object that it ends with."""
    data = report_data(view)
    script = _resource("script.js")
    digest = hashlib.sha256(script.encode()).digest()  # by which the page's policy knows the script
    text = (
        environment()
        .get_template("page.html.j2")
        .render(
            **data,
            figure=Figures(data).figure,
            drawings=drawings(view),
            style=Markup(STYLE + _resource("style.css")),
            script=Markup(script),
            script_hash=base64.b64encode(digest).decode(),
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
