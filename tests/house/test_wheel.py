"""The wheel holds all of the package: both wings as real files, what the report needs, no tests."""

import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from tests.house.source import ROOT, source_files

_BUILT_FROM = ("autopar", "passes", "runtime", "LICENSE", "README.md", "pyproject.toml")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel, built from a copy: building writes beside what it reads."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in _BUILT_FROM:
        path, copy = ROOT / name, folder / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, copy, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, copy)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        return set(held.namelist())


def test_the_wheel_holds_every_module(names: set[str]) -> None:
    paths = [file.path.as_posix() for file in source_files()]
    wings = ("passes/", "runtime/")
    wanted = {f"autopar/{path}" if path.startswith(wings) else path for path in paths}
    assert sorted(wanted - names) == []


def test_the_wheel_holds_what_is_no_module(names: set[str]) -> None:
    folder = ROOT / "autopar" / "report" / "html"
    kept = {path.name for path in folder.iterdir() if path.suffix not in ("", ".py")}
    assert {f"autopar/report/html/{name}" for name in kept} <= names
    assert "autopar/py.typed" in names


def test_the_wheel_holds_nothing_else(names: set[str]) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"autopar"}


def test_extras_that_errors_name_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        word.partition("]")[0]
        for file in source_files()
        for word in file.text.split("autopar[")[1:]
        if "{" not in word.partition("]")[0]
    }
    assert named
    assert named <= set(project["optional-dependencies"])


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = [f.path for f in source_files() if f'"{project["version"]}"' in f.text]
    assert not said
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{project['version']}]" in changelog
