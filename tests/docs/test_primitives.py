"""The page of primitives is what docs/reference/make.py writes, and tells of all there are."""

import runpy

from autopar.rules import primitive_fates
from tests.house.source import ROOT
from tests.rules.primitives import primitives

REFERENCE = ROOT / "docs" / "reference"


def test_the_page_is_what_the_script_writes() -> None:
    script = runpy.run_path(str(REFERENCE / "make.py"))
    kept = (REFERENCE / "primitives.md").read_text(encoding="utf-8")
    assert kept == script["page"](), "look at what `python -m docs.reference.make` writes"


def test_every_primitive_of_this_jax_is_told_of() -> None:
    assert sorted(set(primitives()) - dict(primitive_fates()).keys()) == []
