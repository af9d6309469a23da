"""The HTML page: whole, safe, the same every time, and every figure in its JSON."""

import json
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from autopar.errors import InputError
from autopar.ir.inspection import ModuleRow
from autopar.ir.peak import HeldKind
from autopar.report.html.data import ReportView, plan_summary
from autopar.report.html.page import html_summary, icicle, page
from autopar.report.plan import pipeline
from autopar.report.trace import read_trace
from autopar.runtime.timeline import MeasuredSpan, Timeline, chrome_trace
from tests.report.pages import SPOT, inspection_of, one_program, staged

VOID = {"meta", "link", "br", "wbr", "input"}
SECTIONS = [
    "summary", "cluster", "model", "schedule", "sharding", "communication", "memory",
    "alternatives", "solver", "truth", "data",
]  # fmt: skip
VIEWS = {"one program": one_program, "stages": staged}


class Reader(HTMLParser):
    """Reads a page and checks that what is opened is closed, in turn."""

    def __init__(self, text: str) -> None:
        HTMLParser.__init__(self, convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.found if name == tag]


def data_in(text: str) -> dict[str, Any]:
    """The JSON object of a page."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(params=VIEWS, scope="module")
def text(request: pytest.FixtureRequest) -> str:
    view: Callable[[], ReportView] = VIEWS[request.param]
    return page(view())


def test_every_section_is_there_and_in_the_contents(text: str) -> None:
    read = Reader(text)
    assert [s["id"] for s in read.all("section")] == SECTIONS
    assert [a["href"] for a in read.all("a")][1:] == [f"#{name}" for name in SECTIONS]
    named = {a["id"] for _, a in read.found if "id" in a}
    assert all(s["aria-labelledby"] in named for s in read.all("section"))


def test_nothing_is_loaded_from_anywhere(text: str) -> None:
    read = Reader(text)
    for tag, attributes in read.found:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            address = attributes.get(name, "#")
            assert address.startswith(("#", "data:")), f"<{tag} {name}={address}>"
    styles = "".join(read.texts["style"])
    assert "url(" not in styles
    assert "@import" not in styles
    assert "default-src 'none'" in read.all("meta")[1]["content"]


def test_no_mark_of_the_template_is_left(text: str) -> None:
    shown = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.S)
    assert not re.search(r"\{[{%#]|[}%#]\}|Undefined|\bNone</", shown)
    assert text.isascii()


def test_every_figure_is_in_the_json_and_says_its_unit(text: str) -> None:
    data, figures = data_in(text), Reader(text).all("data")
    assert len(figures) > 40
    for figure in figures:
        exact, _, path = figure["title"].partition(" \N{MIDDLE DOT} ")
        found: Any = data
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        assert float(figure["value"]) == found, path
        counted = not any(path.endswith(end) for end in ("bytes", "seconds", "flops"))
        assert counted or exact.split()[-1] in ("bytes", "s", "FLOP"), figure["title"]


def test_the_same_view_gives_the_same_bytes() -> None:
    for view in VIEWS.values():
        assert page(view()) == page(view())


def test_what_users_name_is_text_and_no_markup() -> None:
    evil = "</script><script>alert(1)</script>"
    text = page(one_program(step=evil))
    read = Reader(text)
    assert len(read.all("script")) == 2
    assert data_in(text)["plan"]["step"] == evil


def test_the_policy_allows_the_page_its_own_script_alone(text: str) -> None:
    script = Reader(text).texts["script"][-1]
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in Reader(text).all("meta")[1]["content"]


def test_the_headline_says_time_waiting_memory_and_proof() -> None:
    lede = re.search(r'<p class="lede">(.*?)</p>', page(one_program()), re.S)
    assert lede is not None
    words = " ".join("".join(Reader(lede[0]).texts[tag]) for tag in ("p",)).split()
    figures = Reader(lede[0]).texts["data"]
    assert figures[:2] == ["10.0\xa0ms", "5.0\xa0%"]
    assert {"684\xa0KiB", "66.8\xa0%", "4.5\xa0%", "9.1\xa0%"} <= set(figures)
    assert "fsdp," in words


def test_stages_that_run_as_one_program_are_told() -> None:
    view = staged()
    for lowering in ("mpmd", "spmd"):
        text = page(replace(view, plan=replace(view.plan, lowering=lowering)))
        chips = Reader(text).texts["span"]
        assert ("one program" in chips) == (lowering == "spmd")
        assert ("in each tick every submesh" in text) == (lowering == "spmd")


def test_what_a_plan_is_compiled_with_is_told() -> None:
    view = one_program()
    options = (("xla_gpu_enable_pipelined_all_gather", True),)
    text = page(replace(view, plan=replace(view.plan, compiler_options=options)))
    assert "compiled with pipelined_all_gather" in Reader(text).texts["span"]
    assert "compiled with" not in page(view)


def test_the_terminal_and_the_page_tell_of_ticks_in_the_same_words() -> None:
    """Accumulation on one submesh is a pipeline of one stage, and may run as one program, too."""
    plan = replace(staged().plan, lowering="spmd")
    here = tuple(a for a in plan.arguments if a.submesh == 0)
    accumulated = replace(
        plan, submeshes=plan.submeshes[:1], stages=plan.stages[:1], arguments=here
    )
    for each in (plan, accumulated, one_program().plan):
        console = Console(width=400, color_system=None)
        with console.capture() as drawn:
            console.print(pipeline(each))
        told = str(plan_summary(each)["spmd_ticks"])
        assert bool(told) == each.is_spmd_pipeline == (each.schedule == "1f1b")
        assert not told or told in drawn.get()


def test_what_a_part_leaves_is_moved_for_no_op() -> None:
    view = one_program()
    (moved, *_) = view.inspection.collectives
    rows = (moved, replace(moved, reader=""))
    text = page(replace(view, inspection=replace(view.inspection, collectives=rows)))
    told = [t for t in Reader(text).texts["small"] if t.startswith(SPOT.region)]
    assert [t.partition(",")[2] for t in told if "," in t] == [" for dot_general; and 1 alike"]


def test_compiled_figures_stand_beside_predicted_ones() -> None:
    text = page(one_program())
    assert text.count('class="bad">differs') == 2  # the plan, and its peak
    assert "one all-gather more" in text
    assert "autopar verify plan.json" not in text
    assert "autopar verify plan.json" in page(replace(one_program(), verification=None))


def test_a_parameter_and_what_mirrors_it_are_one_row() -> None:
    first, odd, batch = data_in(page(one_program(layers=4)))["plan"]["parameters"]
    assert (first["path"], first["mirrors"]) == ("state/params/layer*/mlp/kernel", ["state/opt/mu"])
    assert (first["count"], first["bytes"], first["local_bytes"]) == (8, 8 * 16384, 8 * 2048)
    assert (odd["path"], odd["mirrors"]) == ("state/opt/mu/layer*/mlp/odd*", [])
    assert (batch["path"], batch["mirrors"]) == ("batch/tokens", [])


def test_a_thousand_layers_are_a_small_page() -> None:
    few, many = page(one_program(layers=3)), page(one_program(layers=1000))
    assert len(many) < len(few) + 1000


def test_modules_lie_inside_the_ones_around_them() -> None:
    bars = icicle(inspection_of().modules)
    assert [(b.label, b.depth, b.left) for b in bars] == [
        ("Net", 0, 0.0), ("layer* \N{MULTIPLICATION SIGN} 3", 1, 0.0)
    ]  # fmt: skip
    assert [round(b.width, 3) for b in bars] == [88.889, 77.778]


def test_modules_of_one_name_keep_what_is_in_them() -> None:
    """Stage 0 alone has a `layer*`, and stages 0 and 3 share another; each lies in its own."""
    names = [("", 0, (0, 3)), ("layer*", 6, (0,)), ("layer*/mlp", 6, (0,)),
             ("layer*", 4, (0, 3)), ("layer*/mlp", 4, (0, 3))]  # fmt: skip
    rows = [
        ModuleRow(path, path.count("/") + bool(path), 1, 1, 0, 0, seconds or 10.0, stages)
        for path, seconds, stages in names
    ]
    assert [(b.label, b.depth, round(b.left), round(b.width)) for b in icicle(rows)] == [
        ("layer*", 0, 0, 60), ("mlp", 1, 0, 60), ("layer*", 0, 60, 40), ("mlp", 1, 60, 40)
    ]  # fmt: skip


def test_the_fullest_submesh_comes_first() -> None:
    view = staged()
    curves = view.inspection.memory
    fuller = replace(curves[1].levels[0], by_kind=((HeldKind.BATCH, 10**6),))
    memory = (curves[0], replace(curves[1], levels=(fuller, *curves[1].levels)))
    text = page(replace(view, inspection=replace(view.inspection, memory=memory)))
    assert text.index("mesh1, the fullest") < text.index(">mesh0</h3>")


def test_the_card_needs_no_script_and_styles_itself_alone() -> None:
    for view in VIEWS.values():
        card = html_summary(view().plan)
        read = Reader(card)
        assert card.isascii()
        assert not read.all("script")
        rules = [line for line in read.texts["style"][0].splitlines() if "{" in line]
        assert all(line.startswith(".autopar-card") for line in rules)
        assert "10.0\xa0ms" in read.texts["data"]


def test_a_trace_is_read_as_it_was_written() -> None:
    spans = (
        MeasuredSpan(1, "F1", "F", 1, 2, 0.25, 0.5),
        MeasuredSpan(0, "send to mesh1", "send", -1, 2, 0.125, 0.25, 1),
    )
    found = read_trace(json.dumps(chrome_trace(Timeline(2, spans))), "t.json")
    assert [(s.submesh, s.kind, s.microbatch, s.start_seconds, s.end_seconds) for s in found] == [
        (0, "send", 2, 0.125, 0.25), (1, "F", 2, 0.25, 0.5)
    ]  # fmt: skip
    assert [s.is_transfer for s in found] == [True, False]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{}]}'])
def test_what_is_no_trace_says_what_to_give(text: str) -> None:
    with pytest.raises(InputError, match=r"t\.json .*trace"):
        read_trace(text, "t.json")
