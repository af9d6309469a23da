"""The work and wires of a device over a step as SVG, and when the one waits for the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.ir.inspection import KernelSpan
from autopar.ir.text import show_seconds
from autopar.report.svg import draw
from autopar.report.svg.draw import Axis

_WIDTH, _TOP, _LEFT, _RIGHT = 1000.0, 30.0, 62.0, 16.0
_TALL = 26.0
_MOST = 750  # boxes of a row
_REGIONS = {"forward": "c1", "backward": "c3", "update": "c4"}
_OTHER, _WIRES, _WAITS = "c8", "c5", "c6"

Piece = tuple[float, float, str, str]  # start, end, class, title
Times = list[tuple[float, float]]  # from when to when, in order


def streams_svg(spans: Sequence[KernelSpan], seconds: float = 0.0, standalone: bool = False) -> str:
    """A row of work, coloured by region, over a row of wires; between them when work waits.

    The predicted step may be longer than its spans, because what overlaps slows each other down:
    that is drawn at its end.
    """
    placed = max((span.end_seconds for span in spans), default=0.0)
    seconds = max(seconds, placed)
    work = [span for span in spans if span.stream == "work"]
    wires = [span for span in spans if span.stream == "wires"]
    waits = [
        (start, end)
        for start, end in _uncovered(_union(wires), _union(work))
        if end - start > 1e-9 * seconds  # else only rounding parts them
    ]
    computes, communicates = show_seconds(_total(work)), show_seconds(_total(wires))
    label = (
        f"predicted step {show_seconds(seconds)} on one device: "
        f"computes {computes}, communicates {communicates}"
    )
    axis = Axis(_LEFT, _WIDTH - _LEFT - _RIGHT, 0.0, seconds)
    parts = [draw.text("quiet", 0, 14, label), *axis.ruled(_TOP - 4, _TOP + 74, show_seconds)]
    rows = (
        ("work", _TOP, _TALL, [_piece(span, _region(span)) for span in work]),
        ("waits", _TOP + 30, 10.0, [*_waiting(waits, placed, seconds)]),
        ("wires", _TOP + 44, _TALL, [_piece(span, _WIRES) for span in wires]),
    )
    for name, y, tall, pieces in rows:
        parts.append(draw.text("end", _LEFT - 6, y + tall / 2 + 4, name))
        parts.append(draw.rect("idle", _LEFT, y, axis.width, tall))
        for start, end, css, title in _fewer(pieces, 1 / axis.scale):
            width = max(0.3, (end - start) * axis.scale)
            parts.append(draw.rect(f"{css} crisp", axis.at(start), y, width, tall, title))
    found = {_region(span) for span in work}
    entries = [(css, name) for name, css in _REGIONS.items() if css in found]
    entries += [(_OTHER, "other compute")] * (_OTHER in found)
    entries += [(_WAITS, "exposed"), (_WIRES, "collectives")]
    parts += draw.legend(_LEFT, _TOP + 112, entries)
    return draw.svg(_WIDTH, _TOP + 120, label, parts, standalone)


def _waiting(waits: Times, placed: float, seconds: float) -> Iterator[Piece]:
    """The exposed communication: where nothing overlaps with it, and what overlapping costs."""
    yield from ((a, b, _WAITS, f"waits {_from(a, b)}") for a, b in waits)
    if seconds - placed > 1e-9 * seconds:
        slower = show_seconds(seconds - placed)
        yield placed, seconds, _WAITS, f"{slower} in all: compute and collectives that overlap"


def _uncovered(times: Times, busy: Times) -> Iterator[tuple[float, float]]:
    """The parts of some times that lie in none of the others."""
    first = 0
    for start, end in times:
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        at = first
        while at < len(busy) and busy[at][0] < end:
            if busy[at][0] > start:
                yield start, busy[at][0]
            start = max(start, busy[at][1])
            at += 1
        if start < end:
            yield start, end


def _union(spans: Iterable[KernelSpan]) -> Times:
    """The times at which any of the spans is under way."""
    found: Times = []
    for start, end in sorted((s.start_seconds, s.end_seconds) for s in spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _fewer(pieces: Sequence[Piece], least: float) -> list[Piece]:
    """As many pieces as can be told apart, those shorter than `least` or more drawn together."""
    merged = list(_merge(pieces, least))
    return merged if len(merged) <= _MOST else _fewer(pieces, 2 * least)


def _merge(pieces: Iterable[Piece], least: float) -> Iterator[Piece]:
    """Pieces in order, runs of those that are too narrow as one in the colour of the most."""
    group: list[Piece] = []
    for piece in sorted(pieces):
        wide = piece[1] - piece[0] >= least
        if group and (
            wide or piece[0] - group[-1][1] >= least or piece[1] - group[0][0] > 4 * least
        ):
            yield _together(group)
            group = []
        if wide:
            yield piece
        else:
            group.append(piece)
    if group:
        yield _together(group)


def _together(group: list[Piece]) -> Piece:
    """A single piece for several, in the colour that takes most of their time."""
    if len(group) == 1:
        return group[0]
    spent: dict[str, float] = {}
    for start, end, css, _ in group:
        spent[css] = spent.get(css, 0.0) + end - start
    begin, end = group[0][0], max(piece[1] for piece in group)
    return begin, end, max(spent, key=lambda css: spent[css]), f"{len(group)} {_from(begin, end)}"


def _piece(span: KernelSpan, css: str) -> Piece:
    where = " ".join(word for word in (span.spot.region, span.spot.module, span.spot.line) if word)
    title = f"{span.label} {_from(span.start_seconds, span.end_seconds)} {where}".rstrip()
    return span.start_seconds, span.end_seconds, css, title


def _from(start: float, end: float) -> str:
    return f"{show_seconds(end - start)} from {show_seconds(start)}"


def _region(span: KernelSpan) -> str:
    return _REGIONS.get(span.spot.region, _OTHER)


def _total(spans: Iterable[KernelSpan]) -> float:
    return sum(span.end_seconds - span.start_seconds for span in spans)
