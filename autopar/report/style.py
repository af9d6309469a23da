"""The look of headlines in the terminal: colours, names beside what there is to say, bars."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

ACCENT, GOOD, BAD, QUIET = "cyan", "green", "red", "bright_black"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def facts(pairs: list[tuple[str, str | Text]]) -> Table:
    """Names on the left, what there is to say of them on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid


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
