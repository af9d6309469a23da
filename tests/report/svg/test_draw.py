"""The vocabulary of drawings: numbers, ticks, words and areas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.text import show_bytes, show_seconds
from autopar.report.svg import draw
from tests.report.svg.reading import read


@pytest.mark.parametrize(
    ("length", "text"), [(3.0, "3"), (0.04, "0"), (-0.04, "0"), (2.25, "2.2"), (1e6, "1000000")]
)
def test_lengths_are_told_to_a_tenth(length: float, text: str) -> None:
    assert draw.num(length) == text


@given(st.floats(1e-9, 1e9), st.integers(1, 12), st.sampled_from([2, 10]))
def test_ticks_are_even_few_and_reach_far(end: float, most: int, base: int) -> None:
    ticks = draw.ticks(end, most, base)
    assert ticks[0] == 0
    assert ticks[-1] <= end * (1 + 1e-6)
    assert len(ticks) <= most + 1
    if len(ticks) > 1:
        assert all(t == pytest.approx(i * ticks[1]) for i, t in enumerate(ticks))
        assert end - ticks[-1] < ticks[1] * (1 + 1e-6)


def test_ticks_are_round() -> None:
    assert draw.ticks(33, 8) == [0, 5, 10, 15, 20, 25, 30]
    assert [draw.tidy(show_seconds(t)) for t in draw.ticks(2.1e-3, 5)] == [
        "0", "500 us", "1 ms", "1.5 ms", "2 ms",
    ]  # fmt: skip
    gib = [draw.tidy(show_bytes(t)) for t in draw.ticks(50 * 2**30, 6, base=2)]
    assert gib == ["0", "16 GiB", "32 GiB", "48 GiB"]


@given(st.text())
def test_any_words_are_escaped(words: str) -> None:
    drawn = draw.svg(
        9, 9, f"a {words}", [draw.rect("c1", 0, 0, 1, 1, words), draw.text("", 0, 0, words)]
    )
    box, text = read(drawn)
    printable = "".join(c if c.isprintable() else " " for c in words)
    assert box.title == printable
    assert text.words == printable


@given(st.text(min_size=1, max_size=200), st.integers(20, 300))
def test_clipped_words_fit_and_keep_their_ends(words: str, width: int) -> None:
    short = draw.clipped(words, width)
    assert len(short) <= max(3, width / (draw.SIZE * 0.58)) or short == words
    assert short[0] == words[0]
    assert short[-1] == words[-1]


def test_an_area_goes_up_and_down_in_steps() -> None:
    points = [(0.0, 0.0), (10.0, 4.0), (20.0, 4.0), (30.0, 1.0)]
    assert draw.steps(points, 40.0, 9.0) == "M0 9V9H10V5H30V8H40V9z"
    assert draw.steps([], 40.0, 9.0) == ""


def test_a_drawing_alone_has_its_style_and_dark_colours() -> None:
    alone = draw.svg(10, 10, "label", [], standalone=True)
    assert "prefers-color-scheme:dark" in alone
    assert 'viewBox="-12 -12 34 34"' in alone
    assert "<style>" not in draw.svg(10, 10, "label", [])
    for hue in range(1, draw.HUES + 1):
        assert f"fill:var(--c{hue},#" in draw.STYLE
