"""The tutorial's notebook is what docs/tutorial/make.py makes of the page, and its cells run."""

import json
import runpy
import shlex
from typing import Any

import pytest

from tests.cli.running import run
from tests.house.source import ROOT

TUTORIAL = ROOT / "docs" / "tutorial"


def test_the_notebook_is_that_of_the_page() -> None:
    script = runpy.run_path(str(TUTORIAL / "make.py"))
    kept = (TUTORIAL / "first-plan.ipynb").read_text(encoding="utf-8")
    assert kept == script["notebook"](), "run `python -m docs.tutorial.make`"


@pytest.mark.slow  # they are the blocks of the page, which run in `make test-ci`
@pytest.mark.usefixtures("folder_of_a_reader")
def test_the_cells_of_the_notebook_run() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads((TUTORIAL / "first-plan.ipynb").read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and text.startswith("!autopar "):
            done = run(*shlex.split(text.removeprefix("!autopar ")))
            assert done.code == 0, done.err
        elif cell["cell_type"] == "code":
            exec(compile(text, f"cell {number}", "exec"), names)
