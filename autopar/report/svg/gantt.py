"""A schedule in time as SVG: what each submesh does, when it waits, and what it keeps in flight.

A lane is what one submesh does along the axis of time. Few boxes are drawn one by one with their
names, many as one path a colour, and those that would be hairlines as columns of whole periods,
filled by what share of them each kind of work takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from autopar.ir.program import ONCE
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.svg import draw
from autopar.report.svg.draw import Axis, Show, block, path, rect, steps, text, width_of
from autopar.report.table import percent
from autopar.report.trace import TracedSpan
from autopar.schedule.simulate import Simulation

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


_WIDTH, _TOP, _FOOT = 1000.0, 46.0, 48.0
_TALL, _LEAST_TALL, _MOST_HEIGHT = 18.0, 3.0, 620.0
_MOST_STRIPS, _STRIP = 12, 12.0  # lanes that have their microbatches in flight under them
_COLUMN, _BAR = 66.0, 18.0  # a figure beside a lane, and the longest bar in it
_LINE = 12.0  # pixels between names that can be read


def gantt_svg(
    simulation: Simulation,
    *,
    once_seconds: Sequence[float] = (),
    step_seconds: float = 0.0,
    measured: Sequence[TracedSpan] = (),
    names: Sequence[str] = (),
    show: Show = show_seconds,
    standalone: bool = False,
) -> str:
    """A lane a submesh, time to the right, beside it the share of the step that it waits.

    `once_seconds` follow each submesh's last task. A step takes `step_seconds` at least: a host may
    be slower than the submeshes. `measured` are spans of a step that ran, drawn
    under the predicted ones, their first forward under the predicted first. `names` are those of
    the submeshes, and `show` writes a time.
    """
    predicted = _predicted(simulation, once_seconds, step_seconds, names)
    lanes = [predicted, *([_measured(measured, len(predicted))] if measured else [])]
    chart = _Chart(simulation, lanes, "submesh" if names else "device", show)
    return draw.svg(_WIDTH, chart.bottom + _FOOT, chart.label, chart.parts(), standalone)


class _Chart:
    """The layout of one drawing; `lanes` are the predicted and perhaps the measured."""

    def __init__(
        self, simulation: Simulation, lanes: list[list[Lane]], noun: str, show: Show
    ) -> None:
        self.simulation, self.lanes, self.noun, self.show = simulation, lanes, noun, show
        self.has_bytes = any(simulation.times.activation_bytes)
        every = [lane for kind in lanes for lane in kind]
        left = 14 + max(draw.width_of(lane.name) for lane in every)
        right = _COLUMN * (3 if self.has_bytes else 2) + 12
        start, end = min(lane.start for lane in every), max(lane.end for lane in every)
        self.axis = Axis(left, _WIDTH - left - right, start, end)
        rows, kept = len(lanes[0]), max(simulation.peak_in_flight)
        self.strip = _STRIP if len(lanes) == 1 and rows <= _MOST_STRIPS and kept else 0.0
        room = max(_LEAST_TALL + 1, (_MOST_HEIGHT / rows - self.strip) / len(lanes))
        self.tall = min(_TALL, room - (2 if room > 8 else 1))
        self.pitch = len(lanes) * min(_TALL + 4, self.tall + 2 if room > 8 else room) + self.strip
        self.pitch += 6 if len(lanes) > 1 and room > 8 else 0
        self.bottom = _TOP + rows * self.pitch

    @property
    def label(self) -> str:
        """A line that tells what the drawing shows."""
        grid = self.simulation.grid
        told = (
            f"{what} {self.show(kind[0].end - kind[0].start)}, "
            f"bubble {percent(max(lane.bubble for lane in kind))}"
            for what, kind in zip(("step", "measured"), self.lanes, strict=False)
        )
        counts = (
            f"{_count(len(self.lanes[0]), self.noun)}, {_count(grid.microbatches, 'microbatch')}"
        )
        return f"{grid.name}: {counts}, {'; '.join(told)}"

    def parts(self) -> Iterator[str]:
        """Everything, from the back to the front."""
        yield draw.heading(self.label, self.simulation.grid.name)
        yield from self.axis.ruled(_TOP - 4, self.bottom, self.show)
        every = [lane for kind in self.lanes for lane in kind]
        busiest = max(self.simulation.busy_seconds) / self.simulation.grid.microbatches
        paint, note = painter(every, self.axis, busiest, self.show)
        named = max(1, -int(-_LINE // self.pitch))
        for row, lanes in enumerate(zip(*self.lanes, strict=True)):
            y = _TOP + row * self.pitch
            for lane in lanes:
                yield from self._waiting(lane, y, row % named == 0)
                yield from paint(lane, y, self.tall)
                figures = [
                    (percent(lane.bubble), lane.bubble, "c8"),
                    *(() if lane.measured else self._kept(row)),
                ]
                # To the right of a lane: figures as bars with their words.
                for i, (shown, share, css) in enumerate(figures):
                    x, width = self._column(i), max(0.5, _BAR * share)
                    yield draw.rect(f"{css} faint", x, y, width, self.tall)
                    if row % named == 0:
                        yield draw.text("small", x + width + 3, y + self.tall / 2 + 3.3, shown)
                y += self.tall + 1
            if self.strip:
                yield self._in_flight(row, y + 1)
        heads = ("bubble", "in flight", "held")
        for i, name in enumerate(heads if self.has_bytes else heads[:2]):
            yield draw.text("small quiet", self._column(i), _TOP - 7, name)
        yield from draw.legend(self.axis.left, self.bottom + 42, self._legend(every, note))

    def _waiting(self, lane: Lane, y: float, named: bool) -> Iterator[str]:
        """The name of a lane, and all of its time as waiting until work covers it."""
        x, title = self.axis.at(lane.start), f"{lane.name} waits where nothing covers this"
        yield draw.rect("idle", x, y, self.axis.at(lane.end) - x, self.tall, title)
        if named and self.tall > (6 if lane.measured else 0):
            css = f"end{' small' if self.tall < 11 else ''}{' quiet' if lane.measured else ''}"
            yield draw.text(css, self.axis.left - 6, y + self.tall / 2 + 4, lane.name)

    def _in_flight(self, row: int, y: float) -> str:
        """The number of microbatches in flight, as an area under a lane."""
        peaks = self.simulation.peak_in_flight
        held = [(self.axis.at(t), 8 * n / max(peaks)) for t, n in self.lanes[0][row].in_flight()]
        return draw.path("c5", draw.steps(held, held[-1][0], y + 8), f"at most {peaks[row]}")

    def _column(self, number: int) -> float:
        return self.axis.left + self.axis.width + 12 + _COLUMN * number

    def _kept(self, row: int) -> Iterator[tuple[str, float, str]]:
        """The most that a submesh keeps for the backward pass: microbatches, and their bytes."""
        held, most = self.simulation.peak_in_flight[row], max(self.simulation.peak_in_flight)
        yield str(held), held / (most or 1), "c5"
        if self.has_bytes:
            peaks = self.simulation.peak_bytes
            yield show_bytes(peaks[row]), peaks[row] / (max(peaks) or 1), "c7"

    def _legend(self, lanes: Sequence[Lane], note: str) -> Iterator[tuple[str, str]]:
        found = {mark.kind for lane in lanes for mark in lane.marks}
        yield from ((css, name) for kind, (name, css, _) in KINDS.items() if kind in found)
        yield "idle", "bubble"
        if self.strip:
            yield "c5", "microbatches in flight"
        if self.simulation.grid.chunks > 1 and not note:
            yield "c3 faint", "its other stage"
        if note:
            yield "", note


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun[-1] == 'h' else 's'}"


def _predicted(
    simulation: Simulation, once: Sequence[float], least: float, names: Sequence[str]
) -> list[Lane]:
    """The tasks of each submesh, until the last of them is done, or for the `least` time."""
    rows: list[list[Mark]] = []
    for row, spans in enumerate(simulation.spans):
        held = sorted({span.task.stage for span in spans})
        rows.append([
            Mark(s.task.kind.value, s.task.stage, s.task.microbatch, s.start_seconds,
                 s.end_seconds, held.index(s.task.stage))
            for s in spans
        ])  # fmt: skip
        end = rows[row][-1].end
        if once and once[row] > 0:
            words = "gradient reduction and update, once a step"
            rows[row].append(Mark("once", 0, ONCE, end, end + once[row], name=words))
    names = names or [f"device {d}" for d in range(len(rows))]
    end = max(least, *(row[-1].end for row in rows))
    return [Lane(name, tuple(row), 0.0, end) for name, row in zip(names, rows, strict=True)]


def _measured(spans: Sequence[TracedSpan], rows: int) -> list[Lane]:
    """The spans of each submesh as measured; the first forward starts at 0."""
    work = [s for s in spans if not s.is_transfer]
    zero = min((s.start_seconds for s in work if s.kind == "F"), default=0.0)
    first = min((s.start_seconds for s in work), default=0.0) - zero
    last = max((s.end_seconds for s in work), default=0.0) - zero
    lanes: list[Lane] = []
    for row in range(rows):
        mine = [s for s in work if s.submesh == row]
        held = sorted({s.stage for s in mine if s.kind in KINDS})
        marks = (
            Mark(s.kind, s.stage, s.microbatch, s.start_seconds - zero, s.end_seconds - zero,
                 held.index(s.stage))
            if s.kind in KINDS
            else Mark("once", s.stage, ONCE, s.start_seconds - zero, s.end_seconds - zero,
                      name=s.name)
            for s in mine
        )  # fmt: skip
        lanes.append(Lane("measured", tuple(marks), first, last, measured=True))
    return lanes
