"""The figures of the documentation are what docs/figures/make.py draws."""

import runpy
import xml.etree.ElementTree as ElementTree

import pytest

from tests.house.source import ROOT

FIGURES = ROOT / "docs" / "figures"


@pytest.mark.ci
def test_the_figures_are_those_that_the_script_makes() -> None:
    script = runpy.run_path(str(FIGURES / "make.py"))
    made = {f"{name}.svg": f"{svg}\n" for name, svg in script["figures"]()}
    for svg in made.values():
        ElementTree.fromstring(svg)
    kept = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")}
    assert sorted(made) == sorted(kept)
    changed = [name for name, svg in made.items() if kept[name] != svg]
    assert not changed, f"{changed} changed: look at what `python -m docs.figures.make` writes"
