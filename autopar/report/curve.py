"""What a device holds over a step, drawn for a terminal in columns, the peak marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from autopar.ir.inspection import Level, MemoryCurve
from autopar.ir.peak import HeldKind
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.style import ACCENT, QUIET

_ROWS, _MOST_COLUMNS = 6, 100
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GIVEN = (HeldKind.PARAMETER, HeldKind.OPTIMIZER, HeldKind.BATCH, HeldKind.CONSTANT)


@dataclass(frozen=True)
class Drawn:
    """A curve as wide as the terminal: bytes upwards from nothing, seconds to the right."""

    curve: MemoryCurve

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Six rows of blocks, their scales, and under them the peak."""
        del console
        levels, top = self.curve.levels, self.curve.levels[self.curve.peak]
        scale = max(len(show_bytes(top.nbytes)), len("0 B"))
        width = min(options.max_width - scale - 2, _MOST_COLUMNS)
        end = levels[-1].seconds
        heights = _columns(levels, width)
        base = _given(top) * _ROWS / (top.nbytes or 1)
        for row in reversed(range(_ROWS)):
            mark = show_bytes(top.nbytes) if row == _ROWS - 1 else "0 B" if row == 0 else ""
            blocks = "".join(_block(h / (top.nbytes or 1) * _ROWS - row) for h in heights)
            paint = QUIET if row + 0.5 < base else ACCENT
            yield Text.assemble((f"{mark:>{scale}} ┤", QUIET), (blocks.rstrip(), paint))
        yield Text(" " * (scale + 2) + self._ruler(width, end), style=QUIET)

    def _ruler(self, width: int, end: float) -> str:
        """The step from its start to its end, the peak marked where there is room for it."""
        peak = self.curve.levels[self.curve.peak].seconds
        at, last = min(int(peak / (end or 1.0) * width), width - 1), show_seconds(end)
        line = f"{'0 s':<{width - len(last)}}{last}"
        return f"{line[:at]}▲{line[at + 1 :]}" if line[at] == " " else line


def memory_over_time(curves: Sequence[MemoryCurve]) -> RenderableType:
    """The fullest submesh's curve and its peak, and the peaks of the others."""
    filled = [c for c in curves if c.levels]
    if not filled:
        return Text("The plan keeps no step, so when what is held cannot be told.", style=QUIET)
    fullest = max(filled, key=lambda c: c.levels[c.peak].nbytes)
    where = f", mesh{fullest.submesh}" if len(filled) > 1 else ""
    title = Text(f"What a device holds over a step{where}", style=f"bold {ACCENT}")
    others = [_peak(c, f"mesh{c.submesh} ") for c in filled if c is not fullest]
    return Group(title, Drawn(fullest), _peak(fullest, "▲ "), *others)


def _peak(curve: MemoryCurve, name: str) -> Text:
    top = curve.levels[curve.peak]
    when = f" at {show_seconds(top.seconds)}"
    return Text.assemble((name, QUIET), show_bytes(top.nbytes), (f"{when}: {top.label}", QUIET))


def _columns(levels: Sequence[Level], width: int) -> list[int]:
    """The most that is held in each of so many equal parts of the step."""
    end = levels[-1].seconds or 1.0
    found = [0] * width
    for i, level in enumerate(levels):
        until = levels[i + 1].seconds if i + 1 < len(levels) else end
        first = min(int(level.seconds / end * width), width - 1)
        last = max(first + 1, min(math.ceil(until / end * width), width))
        for column in range(first, last):
            found[column] = max(found[column], level.nbytes)
    return found


def _given(level: Level) -> int:
    """Bytes of arguments, which are there throughout the step."""
    return sum(n for kind, n in level.by_kind if kind in _GIVEN)


def _block(height: float) -> str:
    return _EIGHTHS[round(max(0.0, min(1.0, height)) * (len(_EIGHTHS) - 1))]
