"""Imports run downward only: the contracts of pyproject.toml hold."""

import subprocess
import sys
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
