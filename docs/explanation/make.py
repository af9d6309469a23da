"""Makes the map of the house from its code: floors, what each room is for, and who imports whom.

`python -m docs.explanation.make` writes the picture beside this file and the table of floors in
CONTRIBUTING.md; a test compares both.

The floors are those of the contract in pyproject.toml. A room's purpose is the first sentence of
its docstring. An arrow is an import anywhere in the room: at module level, inside a function, for
type checkers only, or of a module named by a string.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autopar.report.svg import draw

ROOT = Path(__file__).parents[2]
_PACKAGE = ROOT / "autopar"
_CELL, _NAME, _HEAD = 13.0, 92.0, 84.0  # pixels: a cell of the matrix, its names, its heads


@dataclass(frozen=True)
class Room:
    """A folder or module that stands on a floor: `passes.shard`, `errors`."""

    name: str
    floor: int  # 0 is the top

    @property
    def path(self) -> Path:
        """The folder, or the file, without the links to the two wings."""
        inside = Path(*self.name.split("."))
        base = ROOT if inside.parts[0] in ("passes", "runtime") else _PACKAGE
        folder = base / inside
        return folder if folder.is_dir() else folder.with_suffix(".py")

    @property
    def files(self) -> tuple[Path, ...]:
        """Its Python files."""
        path = self.path
        return tuple(sorted(path.rglob("*.py"))) if path.is_dir() else (path,)

    @property
    def purpose(self) -> str:
        """The first sentence of its docstring, without the full stop."""
        path = self.path
        front = path / "__init__.py" if path.is_dir() else path
        text = ast.get_docstring(ast.parse(front.read_text(encoding="utf-8"))) or ""
        return " ".join(text.split("\n\n")[0].split()).rstrip(".")


@cache
def rooms() -> tuple[Room, ...]:
    """Rooms from the top floor down, as the contract lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [
        contract["layers"]
        for contract in contracts["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    return tuple(
        Room(name, floor)
        for floor, names in enumerate(layers)
        for name in re.findall(r"[\w.]+", names)
        if name != "__main__"
    )


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """(importing room, imported room), between rooms that differ, by whatever door."""
    found: set[tuple[str, str]] = set()
    for room in rooms():
        for path in room.files:
            for module in _imported(ast.parse(path.read_text(encoding="utf-8"))):
                other = _room_of(module)
                if other is not None and other != room.name:
                    found.add((room.name, other))
    return frozenset(found)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules of autopar that a file imports, or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("autopar"))
        elif isinstance(node, ast.Call) and _is_import_call(node):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def _is_import_call(node: ast.Call) -> bool:
    return ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")


def _room_of(module: str) -> str | None:
    """The room that a dotted name leads to; the longest name wins."""
    inside = module.removeprefix("autopar.")
    able = [r.name for r in rooms() if inside == r.name or inside.startswith(f"{r.name}.")]
    return max(able, key=len, default=None)


# -- as text -----------------------------------------------------------------------------------


def floors_table() -> str:
    """The floors with what each room is for, as a Markdown table."""
    lines = ["| floor | room | what it is for |", "|---|---|---|"]
    last = -1
    top = max(room.floor for room in rooms())
    for room in rooms():
        number = f"{top - room.floor}" if room.floor != last else ""
        last = room.floor
        lines.append(f"| {number} | `{room.name}` | {room.purpose} |")
    return "\n".join(lines) + "\n"


def contributing() -> str:
    """CONTRIBUTING.md with the table of floors as the code has them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    start, stop = text.index("| floor |"), text.index("\n| to | go to")
    return text[:start] + floors_table() + text[stop:]


# -- as a picture ------------------------------------------------------------------------------


def house() -> str:
    """A square for each pair of rooms; it is filled where the row's room imports the column's.

    Imports run down the floors, so the squares below the diagonal stay empty.
    """
    count = len(rooms())
    label = "which room imports which: a filled square above the diagonal is an import downwards"
    return draw.svg(_NAME + count * _CELL, _HEAD + count * _CELL, label, _matrix(), standalone=True)


def _matrix() -> Iterator[str]:
    listed = rooms()
    side = len(listed) * _CELL
    for i, room in enumerate(listed):
        y, x = _HEAD + i * _CELL, _NAME + i * _CELL
        if i and listed[i - 1].floor != room.floor:
            yield draw.line("rule thin", 0, y, _NAME + side, y)
            yield draw.line("rule thin", x, 0, x, _HEAD + side)
        yield draw.text("end small", _NAME - 5, y + _CELL - 4, room.name)
        yield _upright(x + _CELL - 4, _HEAD - 5, room.name)
        yield draw.rect("idle", x, y, _CELL, _CELL)
        for j, other in enumerate(listed):
            if (room.name, other.name) in arrows():
                yield draw.rect("c1", _NAME + j * _CELL + 2, y + 2, _CELL - 4, _CELL - 4)


def _upright(x: float, y: float, name: str) -> str:
    at = f"{draw.num(x)} {draw.num(y)}"
    return f'<text class="small" transform="translate({at}) rotate(-90)">{name}</text>'


def main() -> None:
    """Write the picture and the table."""
    (Path(__file__).parent / "house.svg").write_text(house() + "\n", encoding="utf-8")
    (ROOT / "CONTRIBUTING.md").write_text(contributing(), encoding="utf-8")


if __name__ == "__main__":
    main()
