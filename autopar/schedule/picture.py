"""Rows of boxes along an axis of time, one row a device, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

IDLE = "·"


@dataclass(frozen=True, slots=True)
class Box:
    """Something that takes a device from start to end; boxes of one paint look alike."""

    label: str
    paint: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Some columns of a row, all in one box or, without paint, in none."""

    text: str
    paint: str | None


@dataclass(frozen=True)
class Picture:
    """A row of boxes a device, each box after the one before it."""

    rows: tuple[tuple[Box, ...], ...]

    @cached_property
    def end(self) -> float:
        """The end of the last box."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def columns_per_unit(self) -> float:
        """The scale at which labels fit into their boxes, with a blank after each.

        Where boxes do not begin at whole columns, rounding takes one more. The shortest boxes may
        be too short for their labels rather than that the others become very long.
        """
        boxes = [box for row in self.rows for box in row if box.end > box.start]
        if not boxes:
            return 1.0
        # The box that is shortest for its label decides, but may stretch the others only so far.
        for blanks in (1, 2):
            asked = sorted((len(b.label) + blanks) / (b.end - b.start) for b in boxes)
            scale = min(asked[-1], _LONGEST * asked[0])
            if all(abs(b.start * scale - round(b.start * scale)) < 1e-6 for b in boxes):
                break
        return scale

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.column(self.end)

    def column(self, time: float) -> int:
        """The column that a time is at."""
        return round(time * self.columns_per_unit)

    def time_at(self, column: int) -> float:
        """The time at which a column begins."""
        return column / self.columns_per_unit

    @property
    def names(self) -> list[str]:
        """The names of the rows, all of one width."""
        digits = len(str(len(self.rows) - 1))
        return [f"device {device:{digits}}" for device in range(len(self.rows))]

    def pieces(self, row: int, first: int = 0, last: int | None = None) -> Iterator[Piece]:
        """The part of a row in the columns from first up to last, which may cut through boxes."""
        last = self.width if last is None else last
        column = first
        for box in self.rows[row]:
            start, end = self.column(box.start), self.column(box.end)
            if end <= first:
                continue
            if start >= last:
                break
            if start > column:
                yield Piece(_idle(start - column), None)
            text = _filled(box.label, end - start)
            yield Piece(text[max(0, first - start) : last - start], box.paint)
            column = end
        if column < last:
            yield Piece(_idle(last - column), None)

    def folds(self, most: int) -> list[tuple[int, int]]:
        """Parts of at most that many columns, from first up to last, all of about one width.

        Where all boxes begin at multiples of some columns, so does each part. No label is cut.
        """
        step = math.gcd(*(self.column(box.start) for row in self.rows for box in row)) or 1
        step = step if step <= most else 1
        most -= most % step
        count = -(-self.width // most)
        size = -(-self.width // (count * step)) * step if count else most
        found = [0]
        while found[-1] < self.width:
            end = min(found[-1] + size, self.width)
            while (start := self._label_over(end)) > found[-1]:
                end = start
            found.append(end)
        return [*pairwise(found)]

    def _label_over(self, column: int) -> int:
        """The column where a label begins that goes on in this one; -1 where none does."""
        begun = ((self.column(box.start), box) for row in self.rows for box in row)
        over = (
            at for at, box in begun if at < column < min(at + len(box.label), self.column(box.end))
        )
        return min(over, default=-1)

    def ruler(self, first: int, last: int) -> str:
        """The time at some of the columns from first up to last."""
        step = _tick(self.columns_per_unit)
        line = ""
        tick = 0
        while (column := self.column(tick * step)) < last:
            mark = f"{tick * step:.6g}"
            if first <= column and column + len(mark) <= last:
                line = line.ljust(column - first) + mark
            tick += 1
        return line

    def lines(self) -> list[str]:
        """The rows, each on one line, however long."""
        return [
            f"{name} | {''.join(piece.text for piece in self.pieces(row)).rstrip()}"
            for row, name in enumerate(self.names)
        ]


_LONGEST = 3  # times its label: how far a box is stretched so that others fit theirs
_STRETCHED = 3  # columns beyond its label from which a box shows how far it goes
_TICK_COLUMNS = 12


def _filled(label: str, width: int) -> str:
    """The label, stretched to the width of its box; cut where the box is too short."""
    if width < len(label) + _STRETCHED:
        return label[:width].ljust(width)
    return label.ljust(width - 1, "-") + " "


def _idle(width: int) -> str:
    return IDLE * (width - 1) + " "


def _tick(scale: float) -> float:
    """A round time, 1, 2 or 5 times a power of ten, of at least a dozen columns."""
    power = 1e-12
    while True:
        for factor in (1, 2, 5):
            if power * factor * scale >= _TICK_COLUMNS:
                return power * factor
        power *= 10
