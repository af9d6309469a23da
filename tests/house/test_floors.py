"""Imports run downward only: the contracts of pyproject.toml hold."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.house.source import ROOT


def test_imports_keep_to_their_floors() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_two_wings_are_linked_into_the_package() -> None:
    for wing in ("passes", "runtime"):
        link = ROOT / "autopar" / wing
        assert link.is_symlink()
        assert link.readlink() == Path("..", wing)


def test_every_floor_is_there() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in contracts["contracts"] if c["type"] == "layers"]
    rooms = [room for floor in layers for room in re.findall(r"[\w.]+", floor)]
    paths = [ROOT / "autopar" / room.replace(".", "/") for room in rooms]
    missing = [p for p in paths if not (p.is_dir() or p.with_suffix(".py").exists())]
    assert not missing, f"floors without a room: {missing}"
