"""A lane of a schedule: what one submesh does along the axis of time, in as few shapes as it takes.

Few boxes are drawn one by one with their names, many as one path a colour, and those that would be
hairlines as columns of whole periods, filled by what share of them each kind of work takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from autopar.ir.program import ONCE
from autopar.report.svg.draw import Axis, Show, block, path, rect, steps, text, width_of

MOST_NAMED, MOST_PACKED = 1_600, 12_000  # boxes
_LEAST_NAMED, _LEAST_PACKED = 2.5, 1.2  # pixels of the usual box
_LEAST_COLUMN, _MOST_COLUMNS = 2.0, 15_000
KINDS = {
    "F": ("forward", "c1", "on"),
    "B": ("backward", "c3", "off"),
    "I": ("input gradient", "c3", "off"),
    "W": ("weight gradient", "c2", "off"),
    "once": ("once a step", "c4", "off"),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Work from start to end, by the keys of KINDS; `chunk` counts a submesh's stages."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    chunk: int = 0
    name: str = ""  # what it is called, if not by the above

    @property
    def title(self) -> str:
        """Its words."""
        what = KINDS[self.kind][0]
        if self.microbatch == ONCE:
            return self.name or what
        return f"{what} of microbatch {self.microbatch}, stage {self.stage}"


@dataclass(frozen=True)
class Lane:
    """The work of one submesh in order, in a step from start to end; foreseen or `measured`."""

    name: str
    marks: tuple[Mark, ...]
    start: float
    end: float
    measured: bool = False

    @property
    def bubble(self) -> float:
        """The share of the step in which it does not work; what only rounding leaves is nothing."""
        busy, whole = sum(mark.end - mark.start for mark in self.marks), self.end - self.start
        return (whole - busy) / whole if whole - busy > 1e-12 * whole else 0.0

    def in_flight(self) -> list[tuple[float, int]]:
        """The times at which microbatches, by chunk, begin to wait for their backward."""
        kinds = {mark.kind for mark in self.marks}
        last = next((kind for kind in "WBI" if kind in kinds), "")
        held, found = 0, list[tuple[float, int]]()
        for mark in self.marks if last else ():
            if mark.kind == "F":
                held += 1
                found.append((mark.start, held))
            elif mark.kind == last:
                held -= 1
                found.append((mark.end, held))
        return found


Painter = Callable[[Lane, float, float], list[str]]


def painter(lanes: Sequence[Lane], axis: Axis, period: float, show: Show) -> tuple[Painter, str]:
    """The function that draws lanes like these, from their y and height, and their legend.

    A `period` is how long the busiest submesh works on a microbatch.
    """
    widths = [(m.end - m.start) * axis.scale for lane in lanes for m in lane.marks]
    usual = median(widths) if widths else 0.0
    if len(widths) <= MOST_NAMED and usual >= _LEAST_NAMED:
        return lambda lane, y, height: _named(lane, axis, y, height, show), ""
    if len(widths) <= MOST_PACKED and usual >= _LEAST_PACKED:
        return lambda lane, y, height: _packed(lane, axis, y, height), ""
    least = max(_LEAST_COLUMN, len(lanes) * axis.width / _MOST_COLUMNS) / axis.scale
    # A column of whole periods holds the same work wherever it begins, so even work looks even.
    column = -(-least // period) * period if period > 0 else least
    note = f"columns of {show(column)}: heights are shares of time"
    return lambda lane, y, height: _blended(lane, axis, y, height, column), note


def _named(lane: Lane, axis: Axis, y: float, height: float, show: Show) -> list[str]:
    """A box with a title for each mark, and its name or number where it fits."""
    parts: list[str] = []
    widest = str(max((mark.microbatch for mark in lane.marks), default=0))
    for mark in lane.marks:
        x, width = axis.at(mark.start), (mark.end - mark.start) * axis.scale
        _, css, ink = KINDS[mark.kind]
        spent = f"{show(mark.start)} to {show(mark.end)} ({show(mark.end - mark.start)})"
        faint = " faint" if mark.chunk % 2 else ""
        parts.append(rect(f"{css}{faint} gap", x, y, width, height, f"{mark.title}: {spent}"))
        label = "" if mark.microbatch == ONCE else str(mark.microbatch)
        size = 9 if width_of(widest) > width - 1 or height < 14 else 11
        if label and height >= 10 and width_of(widest, size) <= width - 1:
            small = " small" if size == 9 else ""
            where = (x + width / 2, y + height / 2 + size * 0.36)
            parts.append(text(f"mid{small}{'' if faint else f' {ink}'}", *where, label))
    return parts


def _packed(lane: Lane, axis: Axis, y: float, height: float) -> list[str]:
    """A path for each colour, its boxes side by side."""
    paths: dict[str, list[str]] = {}
    for mark in lane.marks:
        css = KINDS[mark.kind][1] + (" faint" if mark.chunk % 2 else "")
        box = block(axis.at(mark.start), y, (mark.end - mark.start) * axis.scale, height)
        paths.setdefault(css, []).append(box)
    return [path(css, "".join(boxes)) for css, boxes in paths.items()]


def _blended(lane: Lane, axis: Axis, y: float, height: float, column: float) -> list[str]:
    """Stacked areas: of each column of time the share that each kind of work takes."""
    count = -int(-(axis.end - axis.start) // column)
    shares = {kind: [0.0] * count for kind in KINDS if any(m.kind == kind for m in lane.marks)}
    for mark in lane.marks:
        first = int((mark.start - axis.start) / column)
        for i in range(first, min(count - 1, int((mark.end - axis.start) / column)) + 1):
            begin = axis.start + i * column
            overlap = min(mark.end, begin + column) - max(mark.start, begin)
            shares[mark.kind][i] += max(0.0, overlap) / column
    parts: list[str] = []
    below = [0.0] * count
    for kind, row in shares.items():
        below = [a + b for a, b in zip(below, row, strict=True)]
        tall = [
            (axis.at(axis.start + i * column), height * min(1.0, share))
            for i, share in enumerate(below)
        ]
        area = steps(tall, axis.left + axis.width, y + height)
        parts.insert(0, path(KINDS[kind][1], area))
    return parts
