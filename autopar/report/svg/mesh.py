"""A cluster as it is wired, once for each axis of its mesh, coloured by where a device is on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.cluster import Cluster, axis_links, device_order
from autopar.cluster.placement import cut_out, submesh_shapes
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Submesh
from autopar.ir.text import show_count
from autopar.report.svg import draw
from autopar.report.svg.tiles import axis_class

_WIDTH, _TOP, _CAPTION = 1000.0, 30.0, 34.0
_MOST_DRAWN = 256  # devices that are drawn one by one
_NUMBERED, _NAMED = 14.0, 6.0  # pixels of a cell from which it, or its block, has a name
_LEAST_CELL, _MOST_CELL = 2, 20


@dataclass(frozen=True)
class _Spot:
    """The place of a device: its submesh, and its coordinate on each axis of that mesh."""

    submesh: int
    coordinates: dict[str, int]


@dataclass(frozen=True)
class _Panel:
    """A picture of all devices: what it shows, and the colour and number of each."""

    name: str
    css: str
    facts: str
    cells: tuple[tuple[str, str], ...]


def mesh_svg(cluster: Cluster, meshes: Sequence[Submesh], standalone: bool = False) -> str:
    """A panel an axis, before them one for the submeshes where there are several.

    The submeshes cover the cluster.

    Raises MeshError where a mesh does not lie on the cluster.
    """
    drawn = _Wiring(cluster, meshes)
    return draw.svg(_WIDTH, drawn.height, drawn.label, drawn.parts(), standalone)


class _Wiring:
    """The layout of one drawing."""

    def __init__(self, cluster: Cluster, meshes: Sequence[Submesh]) -> None:
        self.cluster, self.meshes = cluster, meshes
        self.spots = _spots(cluster, meshes)
        self.places = places = cluster.topology.layout()
        count = cluster.device_count
        # Whole pixels, so that no light shows between neighbours.
        self.cell = float(max(_LEAST_CELL, min(_MOST_CELL, round((70_000 / count) ** 0.5))))
        self.panels = list(self._panels())
        wide = places.columns * self.cell + self._between
        room = _WIDTH / min(3, len(self.panels) or 1) - 30
        fitting = max(1, min(places.abreast, int(room / wide)))
        self.abreast = -(-places.blocks // -(-places.blocks // fitting))
        self.wide = max(self.abreast * wide, 230.0) + 24
        lines = -(-places.blocks // self.abreast)
        self.line = places.rows * self.cell + self._between + 4
        self.tall = _CAPTION + lines * self.line + 12
        self.across = max(1, int(_WIDTH / self.wide))
        self.height = _TOP + self.tall * -(-len(self.panels) // self.across)

    @property
    def _between(self) -> float:
        """Room between blocks, for their names and the links that leave them."""
        return 20.0 if self.cell >= _NAMED else 8.0

    @property
    def label(self) -> str:
        """A line that tells what the drawing shows."""
        topology, count = self.cluster.topology, self.cluster.device_count
        direct, levels = topology.direct_link, topology.switch_levels
        wires = [f"{show_count(direct.bytes_per_second, 'B/s')} a link"] if direct else []
        wires += [f"{v.name} {show_count(v.bytes_per_second, 'B/s')} a device" for v in levels]
        hosts = f"{self.cluster.hosts} host{'s' if self.cluster.hosts > 1 else ''}"
        return (
            f"{self.cluster.name}: {count} x {self.cluster.chip.name} on {hosts}, "
            f"{topology}, {', '.join(wires)}"
        )

    def parts(self) -> Iterator[str]:
        """Everything, from the back to the front."""
        yield draw.heading(self.label, self.cluster.name)
        for i, panel in enumerate(self.panels):
            x = i % self.across * self.wide
            y = _TOP + i // self.across * self.tall
            yield draw.text(f"strong {panel.css}", x, y + 12, panel.name)
            yield draw.text("quiet small", x, y + 25, panel.facts)
            yield from self._panel(panel, x + 8, y + _CAPTION + 10)

    def _panel(self, panel: _Panel, x: float, y: float) -> Iterator[str]:
        places, cell = self.places, self.cell
        corners = [
            (
                x + block % self.abreast * (places.columns * cell + self._between),
                y + block // self.abreast * self.line,
            )
            for block in range(places.blocks)
        ]
        few = self.cluster.device_count <= _MOST_DRAWN
        if not few:
            yield from self._runs(panel, corners)
        if not places.linked and places.blocks > 1 and cell >= _NAMED:
            yield draw.path("s8", self._bus(corners))
        for block, (left, top) in enumerate(corners):
            devices = range(block * places.size, (block + 1) * places.size)
            if cell >= _NAMED:
                yield draw.text("quiet small", left, top - 6, places.names[block])
            if few and places.linked:
                yield draw.path("s8", self._links(left, top))
            if few:
                yield from self._cells(panel, devices, left, top)
            if cell >= _NAMED:
                yield draw.path("rule", self._borders(devices, left, top, places.host_of))
            if len(self.meshes) > 1:
                edges = self._borders(devices, left, top, lambda d: self.spots[d].submesh)
                yield draw.path("edge hollow", edges)

    def _cells(self, panel: _Panel, devices: range, left: float, top: float) -> Iterator[str]:
        """A box a device, with its number on the axis where that fits."""
        cell, inset = self.cell, self.cell * 0.1
        for i, device in enumerate(devices):
            x, y = left + i % self.places.columns * cell, top + i // self.places.columns * cell
            css, number = panel.cells[device]
            side = cell - 2 * inset
            yield draw.rect(css, x + inset, y + inset, side, side, self._title(device))
            if cell >= _NUMBERED:
                dark = css == "c1" or (css[0] == "r" and int(css[1:]) < 9)
                where = (x + cell / 2, y + cell / 2 + 3.2)
                ink = "white" if dark else "off"
                yield draw.text(f"mid small {ink}", *where, number)

    def _runs(self, panel: _Panel, corners: Sequence[tuple[float, float]]) -> Iterator[str]:
        """A path for each colour, devices side by side as one box."""
        cell, columns = self.cell, self.places.columns
        boxes: dict[str, list[str]] = {}
        for block, (left, top) in enumerate(corners):
            for row in range(self.places.rows):
                first = block * self.places.size + row * columns
                column = 0
                for css, run in groupby(c for c, _ in panel.cells[first : first + columns]):
                    wide = len(list(run))
                    box = draw.block(left + column * cell, top + row * cell, wide * cell, cell)
                    boxes.setdefault(css, []).append(box)
                    column += wide
        yield from (draw.path(css, "".join(found)) for css, found in boxes.items())

    def _links(self, left: float, top: float) -> str:
        """A wire through each row and column, going on where it closes into a ring."""
        places, cell = self.places, self.cell
        wide, tall = places.columns * cell, places.rows * cell
        over = [5.0 if ring else -cell / 2 for ring in places.wraps]
        rows = (
            draw.wire(left - over[0], top + (r + 0.5) * cell, wide + 2 * over[0], 0)
            for r in range(places.rows)
        )
        columns = (
            draw.wire(left + (c + 0.5) * cell, top - over[1], 0, tall + 2 * over[1])
            for c in range(places.columns)
        )
        return "".join((*rows, *columns))

    def _bus(self, corners: Sequence[tuple[float, float]]) -> str:
        """The network that joins switches: a wire out of each block, and one under each line."""
        wide, tall = self.places.columns * self.cell, self.places.rows * self.cell
        wires: list[str] = []
        for at in range(0, len(corners), self.abreast):
            row = corners[at : at + self.abreast]
            start, y = row[0][0] + wide / 2, row[0][1] + tall
            wires += (draw.wire(x + wide / 2, y, 0, 6) for x, _ in row)
            wires.append(draw.wire(start, y + 6, row[-1][0] - row[0][0], 0))
            if at:
                aside = wide / 2 + 8
                back = f"h{draw.num(-aside)}v{draw.num(-self.line)}h{draw.num(aside)}"
                wires.append(f"M{draw.num(start)} {draw.num(y + 6)}{back}")
        return "".join(wires)

    def _borders(
        self, devices: range, left: float, top: float, key: Callable[[int], object]
    ) -> str:
        """Lines around cells of one key."""
        columns, rows, cell = self.places.columns, self.places.rows, self.cell
        keys = [key(device) for device in devices]
        lines: list[str] = [draw.block(left, top, columns * cell, rows * cell)]
        for i, mine in enumerate(keys):
            row, column = divmod(i, columns)
            x, y = left + (column + 1) * cell, top + (row + 1) * cell
            if column + 1 < columns and keys[i + 1] != mine:
                lines.append(draw.wire(x, y, 0, -cell))
            if row + 1 < rows and keys[i + columns] != mine:
                lines.append(draw.wire(x, y, -cell, 0))
        return "".join(lines)

    def _panels(self) -> Iterator[_Panel]:
        spots, meshes = self.spots, [given.mesh for given in self.meshes]
        if len(meshes) > 1:
            facts = f"{len(meshes)} on {len(spots)} devices"
            hues = ((f"c{s.submesh % draw.HUES + 1}", str(s.submesh)) for s in spots)
            yield _Panel("submeshes", "", facts, tuple(hues))
        for axis in dict.fromkeys(axis for mesh in meshes for axis in mesh.names):
            sizes = sorted({_size(mesh, axis) for mesh in meshes})
            if sizes != [1]:
                first = next(mesh for mesh in meshes if axis in mesh.names)
                facts = _crossing(self.cluster, first, axis) if len(set(meshes)) == 1 else ""
                name = f"{axis} = {' or '.join(map(str, sizes))}"
                shades: list[tuple[str, str]] = []  # of each device: its class and its number
                for s in spots:
                    at, size = s.coordinates.get(axis, 0), _size(meshes[s.submesh], axis)
                    shades.append((f"r{at * (draw.SHADES - 1) // max(1, size - 1)}", str(at)))
                yield _Panel(name, axis_class(first, axis), facts, tuple(shades))

    def _title(self, device: int) -> str:
        spot = self.spots[device]
        where = ", ".join(f"{axis}={at}" for axis, at in spot.coordinates.items())
        mesh = f" mesh{spot.submesh}" if len(self.meshes) > 1 else ""
        return f"device {device}{mesh} {where}".rstrip()


def _spots(cluster: Cluster, meshes: Sequence[Submesh]) -> list[_Spot]:
    """The place of each device, by its number; the submeshes cover them all."""
    found: dict[int, _Spot] = {}
    for number, given in enumerate(meshes):
        for position, device in enumerate(given.devices or device_order(cluster, given.mesh)):
            found[device] = _Spot(number, _coordinates(given.mesh, position))
    return [found[device] for device in range(cluster.device_count)]


def _coordinates(mesh: MeshShape, position: int) -> dict[str, int]:
    """The coordinates, on each axis of a mesh, of a position (row-major)."""
    found: dict[str, int] = {}
    for axis, size in reversed(list(zip(mesh.names, mesh.sizes, strict=True))):
        position, found[axis] = divmod(position, size)
    return {axis: found[axis] for axis in mesh.names}


def _size(mesh: MeshShape, axis: str) -> int:
    return mesh.size([axis]) if axis in mesh.names else 1


def _crossing(cluster: Cluster, mesh: MeshShape, axis: str) -> str:
    """The wires that an axis crosses and their rate for a device; "" if that is not known."""
    if mesh.device_count != cluster.device_count:
        shapes = [s for s in submesh_shapes(cluster) if s.device_count == mesh.device_count]
        if len(shapes) != 1:
            return ""
        cluster = cut_out(cluster, shapes[0])
    levels = axis_links(cluster, mesh, [axis])
    names = " + ".join(f"{v.name} {v.size}{' ring' if v.wraps else ''}" for v in levels)
    rate = min((level.bytes_per_second for level in levels), default=0.0)
    return f"over {names}: {show_count(rate, 'B/s')} a device" if levels else ""
