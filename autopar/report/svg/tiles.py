"""A tensor cut over a mesh, as a small SVG: pieces, copies and sums yet to be made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.ir.sharding import MeshShape, Sharding
from autopar.report.svg import draw

_LONG, _SHORT = 92.0, 30.0  # sides of the face, in pixels
_SHEET, _MOST_SHEETS = 5.0, 5  # how far a sheet lies behind the one before it
_MOST_CUTS, _FEW_CUTS = 24, 10  # the latter without words, as small as in a table
_TOP, _LEFT = 12.0, 10.0


def axis_class(mesh: MeshShape, axis: str) -> str:
    """The colour of a mesh axis, the same in every drawing."""
    return f"c{mesh.names.index(axis) % draw.HUES + 1}"


def tiles_svg(
    shape: Sequence[int],
    sharding: Sharding,
    mesh: MeshShape,
    standalone: bool = False,
    worded: bool = True,
) -> str:
    """A face of the last two dims, sheets for those before them; device 0's piece is filled.

    Where it is not `worded` the words beside it, which say each dim, are only its label.
    """
    tile = _Tile(tuple(shape), sharding, mesh, worded)
    return draw.svg(tile.width, tile.height, tile.label, tile.parts(), standalone)


class _Tile:
    """The layout of one drawing."""

    def __init__(
        self, shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape, worded: bool
    ) -> None:
        self.shape, self.sharding, self.mesh = shape, sharding, mesh
        self.cuts = tuple(mesh.size(axes) for axes in sharding.dims)
        self.deep = math.prod(shape[:-2])
        self.deep_cuts = math.prod(self.cuts[:-2])
        self.sheets = min(_MOST_SHEETS, self.deep) - 1 if len(shape) > 2 else 0
        self.w, self.h = _sides(shape)
        self.x, self.y = _LEFT, _TOP + self.sheets * _SHEET
        self.facts = list(self._facts())
        self.right = self.x + self.w + self.sheets * _SHEET + 14
        words = max(draw.width_of("".join(w for w, _ in line)) for line in self.facts)
        self.told = self.facts if worded else []
        self.most_cuts = _MOST_CUTS if worded else _FEW_CUTS
        self.width = self.right + words + 4 if worded else self.right - 4
        self.height = max(self.y + self.h + 8, _TOP + 15 * len(self.told) + 4)

    @property
    def label(self) -> str:
        """A line that tells what the drawing shows."""
        return "; ".join("".join(words for words, _ in line) for line in self.facts)

    def parts(self) -> Iterator[str]:
        """Everything, from the back to the front."""
        for sheet in reversed(range(1, self.sheets + 1)):
            # With the leading dims cut up, only the first sheets are device 0's.
            mine = sheet < max(1.0, (self.sheets + 1) / self.deep_cuts)
            yield from self._sheet(sheet * _SHEET, mine)
        yield from self._sheet(0.0, True)
        for row, line in enumerate(self.told):
            yield draw.line_of("", self.right, _TOP + 4 + 15 * row, line)

    def _sheet(self, offset: float, mine: bool) -> Iterator[str]:
        x, y = self.x + offset, self.y - offset
        down, across = ((1, 1, *self.cuts)[-2:]) if self.shape else (1, 1)
        yield draw.rect("idle edge thin", x, y, self.w, self.h)
        if mine:
            w, h = max(2.0, self.w / across), max(2.0, self.h / down)
            shard = "x".join(map(str, self.sharding.shard_shape(self.shape, self.mesh)))
            yield draw.rect("c5 edge thin", x, y, w, h, f"device 0 has {shard or 'the scalar'}")
            if self.sharding.partial:
                yield draw.path("edge thin hollow", draw.hatch(x, y, w, h))
        if not offset:
            yield draw.path("edge thin hollow", self._cuts(across, down))

    def _cuts(self, across: int, down: int) -> str:
        """Lines where the face is cut; of very many only so many as can be told apart."""
        x, y, w, h = self.x, self.y, self.w, self.h
        across, down = min(across, self.most_cuts), min(down, self.most_cuts)
        columns = (draw.wire(x + w * i / across, y, 0, h) for i in range(1, across))
        rows = (draw.wire(x, y + h * i / down, w, 0) for i in range(1, down))
        return "".join((draw.block(x, y, w, h), *columns, *rows))

    def _facts(self) -> Iterator[list[tuple[str, str]]]:
        """Lines of words with their classes: each dim, then copies and sums."""
        for size, axes in zip(self.shape, self.sharding.dims, strict=True):
            if not axes:
                yield [(f"{size}", ""), (" whole", "quiet")]
                continue
            cut = self.mesh.size(axes)
            names = [(f" {a} {self.mesh.size([a])}", axis_class(self.mesh, a)) for a in axes]
            yield [(f"{size} /", ""), *names, (f" = {size // cut}", "")]
        used = self.sharding.axes()
        idle = [a for a in self.mesh.names if a not in used and self.mesh.size([a]) > 1]
        if idle:
            copies = self.mesh.size(idle)
            names = [(f" {a}", axis_class(self.mesh, a)) for a in idle]
            yield [(f"{copies} copies over", "quiet"), *names]
        if self.sharding.partial:
            names = [(f" {a}", axis_class(self.mesh, a)) for a in self.sharding.partial]
            yield [("to be summed over", "quiet"), *names]
        if not self.shape and not used and not idle:
            yield [("one number", "quiet")]


def _sides(shape: tuple[int, ...]) -> tuple[float, float]:
    """Width and height of the face: the longer dim is longer, by the root of their ratio."""
    rows, columns = (1, 1, *shape)[-2:]
    if len(shape) < 2:
        return (_LONG, _SHORT / 2) if shape else (_SHORT / 2, _SHORT / 2)
    ratio = max(_SHORT / _LONG, min(1.0, math.sqrt(min(rows, columns) / max(rows, columns, 1))))
    long, short = _LONG * 0.8, _LONG * 0.8 * ratio
    return (long, short) if columns >= rows else (short, long)
