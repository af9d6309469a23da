"""The bytes that a device holds over a step, as SVG: areas by kind, the limit, the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.inspection import MemoryCurve, MemoryLevel
from autopar.ir.peak import HeldKind
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.svg import draw
from autopar.report.svg.draw import Axis

_WIDTH, _HEIGHT, _TOP, _LEFT, _RIGHT = 1000.0, 230.0, 34.0, 62.0, 16.0
_COLUMNS = 450
_HUES = {
    HeldKind.PARAMETER: "c1",
    HeldKind.OPTIMIZER: "c7",
    HeldKind.BATCH: "c8",
    HeldKind.CONSTANT: "c8 faint",
    HeldKind.GRADIENT: "c2",
    HeldKind.ACTIVATION: "c3",
    HeldKind.COLLECTIVE: "c6",
    HeldKind.TEMPORARY: "c4",
}


def memory_svg(curve: MemoryCurve, standalone: bool = False) -> str:
    """Bytes up, time to the right; what lasts lies at the bottom. The peak is marked and named."""
    chart = _Chart(curve)
    return draw.svg(_WIDTH, _TOP + _HEIGHT + 46, chart.label, chart.parts(), standalone)


class _Chart:
    """The layout of one drawing."""

    def __init__(self, curve: MemoryCurve) -> None:
        self.curve, self.levels = curve, curve.levels
        self.peak = curve.levels[curve.peak] if curve.levels else MemoryLevel(0.0, "", ())
        seconds = self.levels[-1].seconds if self.levels else 0.0
        self.axis = Axis(_LEFT, _WIDTH - _LEFT - _RIGHT, 0.0, seconds)
        # A limit that is far above would leave the curve no room.
        self.limit = curve.limit_bytes if curve.limit_bytes <= 4 * self.peak.nbytes else 0
        self.top = 1.06 * max(self.peak.nbytes, self.limit, 1)

    @property
    def label(self) -> str:
        """A line that tells what the drawing shows."""
        share = self.peak.nbytes / self.curve.limit_bytes if self.curve.limit_bytes else 0.0
        return (
            f"at most {show_bytes(self.peak.nbytes)} of {show_bytes(self.curve.limit_bytes)} "
            f"({share:.0%}) at {show_seconds(self.peak.seconds)}, in {self.peak.label}"
        )

    def parts(self) -> Iterator[str]:
        """Everything, from the back to the front."""
        yield draw.text("quiet", 0, 14, draw.clipped(self.label, _WIDTH))
        base, right = _TOP + _HEIGHT, _WIDTH - _RIGHT
        for tick in draw.ticks(self.top, 6, base=2):
            yield draw.line("rule", _LEFT, self._y(tick), right, self._y(tick))
            words = draw.tidy(show_bytes(tick))
            yield draw.text("quiet end", _LEFT - 6, self._y(tick) + 4, words)
        yield from self.axis.ruled(base, base, show_seconds)
        yield from self._areas()
        if self.limit:
            yield draw.line("s6 dash", _LEFT, self._y(self.limit), right, self._y(self.limit))
            words = f"limit {show_bytes(self.limit)}"
            yield draw.text("c6 end", right, self._y(self.limit) - 4, words)
        yield from self._mark()
        found = {kind for level in self.levels for kind, n in level.by_kind if n}
        entries = [(css, kind.value) for kind, css in _HUES.items() if kind in found]
        yield from draw.legend(_LEFT, base + 38, entries)

    def _areas(self) -> Iterator[str]:
        """Stacked from the top down, each area reaching to the bottom."""
        columns = _columns(self.levels, self.axis.end)
        held = [dict(level.by_kind) for level in columns]
        below = [0] * len(columns)
        parts: list[str] = []
        width = self.axis.width / max(1, len(columns))
        for kind, css in _HUES.items():
            if not any(level.get(kind) for level in held):
                continue
            below = [n + level.get(kind, 0) for n, level in zip(below, held, strict=True)]
            outline = ((_LEFT + i * width, n / self.top * _HEIGHT) for i, n in enumerate(below))
            area = draw.steps(outline, _WIDTH - _RIGHT, _TOP + _HEIGHT)
            most = show_bytes(max(level.get(kind, 0) for level in held))
            parts.append(draw.path(css, area, f"{kind.value}: at most {most}"))
        yield from reversed(parts)

    def _mark(self) -> Iterator[str]:
        x, y = self.axis.at(self.peak.seconds), self._y(self.peak.nbytes)
        side, step = (" end", -7) if x > _WIDTH / 2 else ("", 7)
        words = "; ".join(
            f"{kind.value} {show_bytes(n)}"
            for kind, n in sorted(self.peak.by_kind, key=lambda pair: -pair[1])
            if n
        )
        spot = f"M{draw.num(x)} {draw.num(y)}l-5 -7h10z"
        yield draw.path("edge thin", f"M{draw.num(x)} {draw.num(y)}V{draw.num(_TOP + _HEIGHT)}")
        yield draw.path("c6", spot, f"peak {show_bytes(self.peak.nbytes)}: {words}")
        yield draw.text(f"strong{side}", x + step, y - 5, f"peak {show_bytes(self.peak.nbytes)}")

    def _y(self, nbytes: float) -> float:
        return _TOP + _HEIGHT * (1 - nbytes / self.top)


def _columns(levels: Sequence[MemoryLevel], seconds: float) -> list[MemoryLevel]:
    """The level that holds the most in each equal part of time, its first one included."""
    if not levels:
        return []
    filled: list[MemoryLevel] = []
    at, latest = 0, levels[0]
    for column in range(_COLUMNS):
        most = latest
        while at < len(levels) and levels[at].seconds * _COLUMNS <= (column + 1) * seconds:
            latest = levels[at]
            most = max(most, latest, key=lambda level: level.nbytes)
            at += 1
        filled.append(most)
    return filled
