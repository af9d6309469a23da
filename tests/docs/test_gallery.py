"""The gallery is what docs/gallery/make.py writes of the plans that are made now."""

import runpy

import pytest

from tests.house.source import ROOT

GALLERY = ROOT / "docs" / "gallery"


@pytest.mark.ci
def test_the_gallery_is_what_is_planned_now() -> None:
    script = runpy.run_path(str(GALLERY / "make.py"))
    kept = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert kept == script["page"](), "run `python -m docs.gallery.make`"
