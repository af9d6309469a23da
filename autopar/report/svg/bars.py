"""Horizontal bars of two parts, the longest first: what is hidden and what is waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.ir.text import show_seconds
from autopar.report.svg import draw

_WIDTH, _PITCH, _BAR, _TOP = 720.0, 20.0, 13.0, 8.0
_MOST_NAME = 300.0


@dataclass(frozen=True)
class Bar:
    """A name with seconds that are waited for and seconds that other work hides."""

    name: str
    exposed: float
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Both parts."""
        return self.exposed + self.hidden


def bars_svg(rows: Iterable[Bar], label: str, standalone: bool = False) -> str:
    """A bar a row, its figures at its end; equals keep their order."""
    bars = sorted(rows, key=lambda bar: -bar.total)
    left = 8 + max((min(_MOST_NAME, draw.width_of(bar.name)) for bar in bars), default=0.0)
    shown = [_figures(bar) for bar in bars]
    room = _WIDTH - left - 12 - max((draw.width_of(words) for words in shown), default=0.0)
    longest = max((bar.total for bar in bars), default=0.0) or 1.0
    height = _TOP + _PITCH * len(bars) + 22
    content = [
        shape
        for row, (bar, words) in enumerate(zip(bars, shown, strict=True))
        for shape in _row(bar, words, (left, _TOP + row * _PITCH), room / longest)
    ]
    split = any(bar.hidden > 0 for bar in bars)
    named = [("c6", "exposed"), ("c5", "hidden")][: 1 + split]
    key = draw.legend(left, height - 6, named)
    return draw.svg(_WIDTH, height, label, [*content, *key], standalone)


def _row(bar: Bar, words: str, at: tuple[float, float], scale: float) -> Iterator[str]:
    x, y = at
    name = draw.clipped(bar.name, x - 8)
    yield draw.text("end", x - 6, y + _BAR / 2 + 4, name)
    first, second = bar.exposed * scale, bar.hidden * scale
    title = f"{bar.name}: {words}"
    yield draw.rect("c6", x, y, max(0.5, first) if bar.exposed else 0, _BAR, title)
    if bar.hidden > 0:
        yield draw.rect("c5", x + first, y, max(0.5, second), _BAR, title)
    yield draw.text("quiet", x + first + second + 6, y + _BAR / 2 + 4, words)


def _figures(bar: Bar) -> str:
    if bar.hidden <= 0 or bar.exposed <= 0:
        return show_seconds(bar.total)
    return f"{show_seconds(bar.total)}, {show_seconds(bar.exposed)} of it exposed"
