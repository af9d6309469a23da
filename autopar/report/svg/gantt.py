"""A schedule in time as SVG: what each submesh does, when it waits, and what it keeps in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.program import ONCE
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.svg import draw
from autopar.report.svg.draw import Axis, Show
from autopar.report.svg.lanes import KINDS, Lane, Mark, painter
from autopar.report.table import percent
from autopar.report.trace import TracedSpan
from autopar.schedule.simulate import Simulation

_WIDTH, _TOP, _FOOT = 1000.0, 46.0, 48.0
_TALL, _LEAST_TALL, _MOST_HEIGHT = 18.0, 3.0, 620.0
_MOST_STRIPS, _STRIP = 12, 12.0  # lanes that have their microbatches in flight under them
_COLUMN, _BAR = 66.0, 18.0  # a figure beside a lane, and the longest bar in it
_LINE = 12.0  # pixels between names that can be read


def gantt_svg(
    simulation: Simulation,
    *,
    once_seconds: Sequence[float] = (),
    measured: Sequence[TracedSpan] = (),
    names: Sequence[str] = (),
    show: Show = show_seconds,
    standalone: bool = False,
) -> str:
    """A lane a submesh, time to the right, beside it the share of the step that it waits.

    `once_seconds` follow each submesh's last task. `measured` are spans of a step that ran, drawn
    under the predicted ones, their first forward under the predicted first. `names` are those of
    the submeshes, and `show` writes a time.
    """
    predicted = _predicted(simulation, once_seconds, names)
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
                figures = [_bubble(lane), *(() if lane.measured else self._kept(row))]
                yield from self._beside(figures, y, row % named == 0)
                y += self.tall + 1
            if self.strip:
                yield self._in_flight(row, y + 1)
        yield from self._heads()
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

    def _heads(self) -> Iterator[str]:
        names = ("bubble", "in flight", "held")
        for i, name in enumerate(names if self.has_bytes else names[:2]):
            yield draw.text("small quiet", self._column(i), _TOP - 7, name)

    def _beside(
        self, figures: Sequence[tuple[str, float, str]], y: float, told: bool
    ) -> Iterator[str]:
        """To the right of a lane: figures as bars with their words."""
        for i, (shown, share, css) in enumerate(figures):
            x, width = self._column(i), max(0.5, _BAR * share)
            yield draw.rect(f"{css} faint", x, y, width, self.tall)
            if told:
                yield draw.text("small", x + width + 3, y + self.tall / 2 + 3.3, shown)

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


def _bubble(lane: Lane) -> tuple[str, float, str]:
    return percent(lane.bubble), lane.bubble, "c8"


def _predicted(simulation: Simulation, once: Sequence[float], names: Sequence[str]) -> list[Lane]:
    """The tasks of each submesh, until the last of them is done."""
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
    end = max(row[-1].end for row in rows)
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
