"""An option that writes what commands print now into pages, and the folder that they assume."""

from pathlib import Path

import jax
import pytest

from tests.house.source import ROOT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--docs-update", action="store_true", help="Write the figures of console blocks anew."
    )


@pytest.fixture
def folder_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[jax.Device]
) -> Path:
    """An empty working folder with the examples in it; the pages assume eight devices."""
    del devices
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
