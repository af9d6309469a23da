"""A schedule in time, drawn for a terminal: a row a device, folded to its width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.report.style import QUIET
from autopar.schedule.grid import Kind
from autopar.schedule.picture import IDLE, Picture

_COLORS = {"F": "cyan", "B": "green", "I": "green", "W": "yellow"}
_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
_CLOCKS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LEAST_COLUMNS = 24


@dataclass(frozen=True)
class Drawing:
    """A picture folded to the terminal; of one with more than `lines` the beginning and the end.

    `clock` is what the axis shows, and `unabridged` tells where all of it is to be had.
    """

    picture: Picture
    lines: int
    clock: str = "time"
    unabridged: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many columns as there is room for, part under part."""
        del console
        picture = self.picture
        folds = picture.folds(max(options.max_width - self._margin, _LEAST_COLUMNS))
        most = max(2, self.lines // (len(picture.names) + 2))
        left_out = folds[most - 1 : -1]
        for first, last in folds[: most - 1]:
            yield from self._fold(first, last)
        if left_out:
            start, end = picture.time_at(left_out[0][0]), picture.time_at(left_out[-1][1])
            words = f"{start:.6g} to {end:.6g} left out{self.unabridged}"
            yield _line(f"{'...':{self._margin}}{words}\n")
        for first, last in folds[most - 1 :][-1:]:
            yield from self._fold(first, last)

    @property
    def _margin(self) -> int:
        return len(self.picture.names[0]) + 2

    def _fold(self, first: int, last: int) -> Iterator[Text]:
        """The columns from first up to last of every row, under their times."""
        yield _line(f"{self.clock:{self._margin}}{self.picture.ruler(first, last)}")
        for row, name in enumerate(self.picture.names):
            line = _line(f"{name}  ")
            for piece in self.picture.pieces(row, first, last):
                line.append(piece.text, _COLORS[piece.paint] if piece.paint else QUIET)
            line.rstrip()
            yield line
        yield Text()


def in_clock(picture: Picture) -> tuple[Picture, str]:
    """A picture in seconds in the unit that suits its length, and that unit's name."""
    unit, name = next((c for c in _CLOCKS if picture.end >= c[0]), _CLOCKS[-1])
    rows = (
        tuple(replace(box, start=box.start / unit, end=box.end / unit) for box in row)
        for row in picture.rows
    )
    return Picture(tuple(rows)), name


def legend(kinds: Iterable[Kind], chunks: int) -> Text:
    """The meaning of the letters and numbers of a picture."""
    found = Text()
    for kind in kinds:
        found.append(f"{kind.value} {_KINDS[kind]}  ", _COLORS[kind.value])
    one = "F3: microbatch 3" if chunks == 1 else "F5.3: stage 5, microbatch 3"
    return found.append(f"{IDLE} waiting  ", QUIET).append(one, QUIET)


def _line(text: str) -> Text:
    """A line that is never folded: its columns are points in time."""
    return Text(text, style=QUIET, no_wrap=True, overflow="ignore")
