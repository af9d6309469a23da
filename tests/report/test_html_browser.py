"""The HTML page in a browser without a window: it shows, sorts, filters, fits, darkens, prints."""

from collections.abc import Generator
from pathlib import Path

import pytest

from autopar.report.html.page import page
from tests.report.browser import Tab, browsing, chromium
from tests.report.pages import one_program, staged

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH to draw pages")

WIDE = "document.documentElement.scrollWidth"
SIZES = """[...document.querySelectorAll("main > section, svg, table")]
    .filter((e) => !e.closest("details:not([open])"))
    .map((e) => e.getBoundingClientRect()).map((r) => Math.min(r.width, r.height))"""
PATHS = """[...document.querySelectorAll("#sharding tbody tr")]
    .filter((row) => !row.hidden).map((row) => row.cells[1].innerText.split(" ")[0])"""
TYPE = """(words) => {
    const input = document.querySelector("#sharding input");
    input.value = words;
    input.dispatchEvent(new Event("input"));
}"""
HEAD = """document.querySelector('#sharding th [aria-label="Sort by a device"]')"""
COLOUR = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "one.html").write_text(page(one_program()), encoding="ascii")
    (folder / "many.html").write_text(page(one_program(layers=50)), encoding="ascii")
    (folder / "staged.html").write_text(page(staged()), encoding="ascii")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Tab]:
    assert PROGRAM is not None
    with browsing(PROGRAM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Tab:
    """The tab at a usual size, in light."""
    browser.prefer("light")
    browser.resize(1280)
    return browser


@pytest.mark.parametrize("name", ["one.html", "staged.html"])
def test_a_page_opens_with_no_error_and_asks_no_network(tab: Tab, pages: Path, name: str) -> None:
    tab.open(pages / name)
    sizes = tab.run(SIZES)
    assert len(sizes) > 20
    assert min(sizes) > 0
    asked = [e["request"]["url"] for e in tab.told_of("Network.requestWillBeSent")]
    assert asked == [(pages / name).as_uri()]
    assert not tab.told_of("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


@pytest.mark.parametrize("width", [400, 760, 1280, 2000])
@pytest.mark.parametrize("name", ["one.html", "staged.html"])
def test_nothing_sticks_out_to_the_right(tab: Tab, pages: Path, name: str, width: int) -> None:
    tab.resize(width)
    tab.open(pages / name)
    assert tab.run(WIDE) <= width


def test_the_theme_follows_the_system_then_the_button(tab: Tab, pages: Path) -> None:
    tab.open(pages / "one.html")
    light = tab.run(COLOUR)
    bright = tab.picture(whole=False)
    tab.prefer("dark")
    dark = tab.run(COLOUR)
    assert light == "rgb(255, 255, 255)"
    assert dark != light
    assert tab.picture(whole=False) != bright
    tab.run('document.getElementById("theme").click()')
    assert tab.run(COLOUR) == light
    tab.run('document.getElementById("theme").click()')
    assert tab.run(COLOUR) == dark


def test_a_filter_keeps_the_rows_that_have_all_its_words(tab: Tab, pages: Path) -> None:
    tab.open(pages / "one.html")
    assert len(tab.run(PATHS)) == 3
    tab.run(f'({TYPE})("params/**/kernel f32")')
    assert tab.run(PATHS) == ["state/params/layer*/mlp/kernel"]
    assert tab.run('document.querySelector("#sharding output").value') == "1 of 3 rows"
    tab.run(f'({TYPE})("kernel i64 (")')
    assert tab.run(PATHS) == []
    tab.run(f'({TYPE})("")')
    assert len(tab.run(PATHS)) == 3


def test_a_click_on_a_head_sorts_by_the_exact_figures(tab: Tab, pages: Path) -> None:
    tab.open(pages / "one.html")
    values = """[...document.querySelectorAll("#sharding tbody tr")]
        .map((row) => Number(row.cells[row.cells.length - 1].querySelector("data").value))"""
    tab.run(f"{HEAD}.click()")
    down = tab.run(values)
    assert down == sorted(down, reverse=True)
    assert tab.run(f'{HEAD}.parentNode.getAttribute("aria-sort")') == "descending"
    tab.run(f"{HEAD}.click()")
    assert tab.run(values) == sorted(down)


def test_the_page_can_be_used_by_keys_alone(tab: Tab, pages: Path) -> None:
    tab.open(pages / "one.html")
    tab.key("Tab")
    assert tab.run("document.activeElement.className") == "skip"
    tab.run(f"{HEAD}.focus()")
    tab.key("Enter")
    assert tab.run(f'{HEAD}.parentNode.getAttribute("aria-sort")') == "descending"
    unnamed = """[...document.querySelectorAll("button, input, a, [tabindex]")]
        .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.closest("label")))"""
    assert tab.run(f"{unnamed}.length") == 0


def test_the_contents_show_where_the_reader_is(tab: Tab, pages: Path) -> None:
    tab.open(pages / "one.html")
    tab.run("""new Promise((seen) => {
        document.querySelector("#memory").scrollIntoView();
        requestAnimationFrame(() => requestAnimationFrame(seen));
    })""")
    assert tab.run("document.querySelector('nav [aria-current=\"true\"]').hash") == "#memory"


def test_long_tables_show_their_beginning_until_asked(tab: Tab, pages: Path) -> None:
    tab.open(pages / "one.html")
    tab.run("""(() => {
        const body = document.querySelector("#sharding tbody");
        for (let i = 0; i < 80; i++) body.append(body.rows[0].cloneNode(true));
    })()""")
    source = tab.run('document.querySelector("body > script:last-of-type").textContent')
    tab.run(f"(() => {{ {source} }})()")
    shown = '[...document.querySelectorAll("#sharding tbody tr")].filter((r) => !r.hidden).length'
    assert tab.run(shown) == 30
    tab.run("""[...document.querySelectorAll("#sharding button")]
        .find((b) => b.textContent === "Show all 83 rows").click()""")
    assert tab.run(shown) == 83


def test_it_prints_light_and_in_full(tab: Tab, pages: Path) -> None:
    tab.prefer("dark")
    tab.open(pages / "staged.html")
    paper = tab.paper()
    assert paper.startswith(b"%PDF")
    assert tab.run('document.querySelectorAll("details:not([open])").length') == 0
    tab.prefer("dark", media="print")
    assert tab.run(COLOUR) == "rgb(255, 255, 255)"
    hidden = '["nav", "#theme", ".filter"].map((s) => document.querySelector(s).offsetHeight)'
    assert tab.run(hidden) == [0, 0, 0]


def test_without_script_the_page_says_the_same(tab: Tab, pages: Path) -> None:
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(pages / "one.html")
        tab.send("Emulation.setScriptExecutionDisabled", value=False)
        assert len(tab.run(PATHS)) == 3
        shown = '[".filter", "#theme", "#save"].map((s) => document.querySelector(s).offsetHeight)'
        assert tab.run(shown) == [0, 0, 0]
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)
