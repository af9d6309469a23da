"""The version stands once in pyproject.toml, and the changelog keeps up with it."""

import re
import tomllib
from importlib.metadata import version

import pytest

from tests.house.source import ROOT


@pytest.mark.smoke
def test_changelog_opens_with_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert newest is not None, "CHANGELOG.md names no version"
    assert newest.group(1) == project["version"]
    assert version("autopar") == project["version"], "reinstall: make clean, then make test"
