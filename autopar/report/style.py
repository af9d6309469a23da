"""How every table and headline of the terminal looks."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

ACCENT, GOOD, BAD, QUIET = "cyan", "green", "red", "bright_black"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class SlashedPath:
    """A path that a narrow column breaks after its slashes, later lines set in."""

    path: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The path on as many lines as the width asks for."""
        del console
        lines = [""]
        for part in self._parts():
            if lines[-1].strip() and len(lines[-1]) + len(part) > options.max_width:
                lines.append("  ")
            lines[-1] += part
        yield Text("\n".join(lines), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the longest part to the whole path."""
        del console
        longest = max(len(part) for part in self._parts()) + 2
        return Measurement(min(longest, len(self.path)), len(self.path)).with_maximum(
            options.max_width
        )

    def _parts(self) -> list[str]:
        *parents, last = self.path.split("/")
        return [*(f"{parent}/" for parent in parents), last]


def plain_table(title: str, *columns: str) -> Table:
    """A table with a rule under its head; a column whose name starts with > is set right.

    A leading ~ marks the column that folds where the terminal is narrow.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        title_style=f"bold {ACCENT}",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
    )
    for name in columns:
        fold, right = name.startswith("~"), name.startswith(">")
        table.add_column(
            name.lstrip(">~"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=not fold,
        )
    return table


def facts(pairs: list[tuple[str, str | Text]]) -> Table:
    """Names on the left, what there is to say of them on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid


def percent(share: float) -> str:
    """A share in per cent: what is there but rounds to nothing says so."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def bar(share: float, width: int = 20) -> Text:
    """A share of one as a bar of eighths; full and red from one on."""
    whole = max(0.0, min(1.0, share)) * width
    full, rest = int(whole), int((whole - int(whole)) * 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    color = BAD if share >= 1 else "yellow" if share > 0.9 else GOOD
    return Text.assemble((filled, color), ("·" * (width - len(filled)), QUIET))


def sparkline(numbers: list[float], width: int = 40) -> str:
    """Numbers as a line of blocks, from the least to the greatest."""
    if not numbers:
        return ""
    picked = [numbers[i * len(numbers) // width] for i in range(width)]
    picked = picked if len(numbers) > width else numbers
    low, high = min(picked), max(picked)
    span = (high - low) or 1.0
    return "".join(_LEVELS[round((n - low) / span * (len(_LEVELS) - 1))] for n in picked)
