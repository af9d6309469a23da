"""The README's table of measurements is what docs/benchmarks/make.py writes."""

import runpy

from tests.house.source import ROOT


def test_the_table_is_that_of_the_stored_measurements() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "benchmarks" / "make.py"))
    kept = (ROOT / "README.md").read_text(encoding="utf-8")
    assert kept == script["readme"](), "run `python -m docs.benchmarks.make`"
